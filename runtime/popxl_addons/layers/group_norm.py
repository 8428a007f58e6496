"""Normalisation of groups of channels."""

from typing import Any

import numpy as np
import popxl
from popxl import ReplicaGrouping, Tensor, ops
from popxl.utils import to_numpy

from popxl_addons.module import Module
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.utils import WeightsDict


class GroupNorm(Module):
    """Groups of each sample's channels to mean 0 and variance 1, times ``weight`` (ones) plus
    ``bias`` (zeros).

    Args:
        num_groups: how many equal groups of neighbouring channels.
        replica_grouping: replicas that share the variables; default: all.
        eps: added to the variance, in the units of x squared.
        cache: `create_graph` gives the same graph again for equal arguments.
    """

    def __init__(
        self,
        num_groups: int,
        replica_grouping: ReplicaGrouping | None = None,
        eps: float = 1e-5,
        cache: bool = False,
    ) -> None:
        super().__init__(cache=cache)
        self.num_groups = num_groups
        self.replica_grouping = replica_grouping
        self.eps = eps

    def build(self, x: Tensor) -> Tensor:
        """Shapes: ``[n, channels, ...] -> [n, channels, ...]``. ValueError for what
        `ops.group_norm` refuses.
        """
        if x.rank < 2:
            raise ValueError(
                f"GroupNorm: got x {x.spec}; expected two axes or more [n, channels, ...]. "
                "Reshape it first."
            )
        channels = x.shape[1]
        grouping = self.replica_grouping
        self.weight = self.add_variable_input(
            "weight", lambda: np.ones(channels), x.dtype, replica_grouping=grouping
        )
        self.bias = self.add_variable_input(
            "bias", lambda: np.zeros(channels), x.dtype, replica_grouping=grouping
        )
        return ops.group_norm(x, self.weight, self.bias, self.num_groups, self.eps)

    @staticmethod
    def torch_mapping(
        variables: NamedTensors, nn_layer: Any, dtype: popxl.dtype = popxl.float32
    ) -> WeightsDict:
        """``{variable: host weight}`` from a torch group norm."""
        return WeightsDict(
            {
                variables.weight: to_numpy(nn_layer.weight, dtype),
                variables.bias: to_numpy(nn_layer.bias, dtype),
            }
        )
