"""Affine map of the last axis."""

from typing import Any

import numpy as np
import popxl
from popxl import ReplicaGrouping, Tensor
from popxl.utils import to_numpy

from popxl_addons.layers.initial import truncated_normal
from popxl_addons.module import Module
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.utils import WeightsDict


class Linear(Module):
    """``x @ weight + bias`` with ``weight`` [in, out] (truncated normal, 0.02) and ``bias`` [out]
    (zeros).

    Args:
        replica_grouping: replicas that share the variables; default: all.
    """

    def __init__(
        self,
        out_features: int,
        bias: bool = True,
        replica_grouping: ReplicaGrouping | None = None,
    ) -> None:
        super().__init__()
        self.out_features = out_features
        self.bias = bias
        self.replica_grouping = replica_grouping

    def build(self, x: Tensor) -> Tensor:
        """Shapes: ``[..., in] -> [..., out]``."""
        shape = (x.shape[-1], self.out_features)
        self.weight = self.add_variable_input(
            "weight",
            lambda: truncated_normal(shape),
            x.dtype,
            replica_grouping=self.replica_grouping,
        )
        y = x @ self.weight
        if self.bias:
            self.b = self.add_variable_input(
                "bias",
                lambda: np.zeros(self.out_features),
                x.dtype,
                replica_grouping=self.replica_grouping,
            )
            y = y + self.b
        return y

    @staticmethod
    def torch_mapping(
        variables: NamedTensors, nn_layer: Any, dtype: popxl.dtype = popxl.float32
    ) -> WeightsDict:
        """``{variable: host weight}`` from a torch linear layer, whose weight is transposed."""
        weights = WeightsDict({variables.weight: to_numpy(to_numpy(nn_layer.weight).T, dtype)})
        if nn_layer.bias is not None:
            weights[variables.bias] = to_numpy(nn_layer.bias, dtype)
        return weights
