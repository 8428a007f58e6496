"""Affine map of the last axis, with a weight in four bits."""

from typing import Any

import numpy as np
import popxl
from popxl import ReplicaGrouping, Tensor
from popxl.utils import to_numpy

from popxl_addons.module import Module
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.ops.group_quantize_decompress.group_quantize_decompress import (
    LEVELS,
    PACKED,
    group_quantize_compress_numpy,
    group_quantize_decompress,
)
from popxl_addons.utils import WeightsDict

INITIAL_STD = 0.02
LEVELS_STD = ((LEVELS**2 - 1) / 12) ** 0.5
"""Standard deviation of levels that are equally likely."""


class LinearGQ(Module):
    """``x @ weight + bias`` with a weight [in, out] that is kept packed, and unpacked whenever it
    is used.

    Variables: ``weight`` [a, groups, group_size/4], uint16; ``group_scale`` and ``group_bias`` [a,
    groups, 1]; ``bias`` [out]. Groups lie along the axis ``dim`` of [in, out]; a is the other axis.
    Fresh weights are random levels around zero with a standard deviation of 0.02. The packed weight
    has no gradient; the other variables and x do.

    Args:
        replica_grouping: replicas that share the variables; default: all.
        group_size: elements that share a scale and a bias, a multiple of 4 that divides the axis;
            0: the whole axis.
        dim: the axis of [in, out] along which elements are grouped.
    Raises:
        ValueError: if built with a group size that does not fit.
    """

    def __init__(
        self,
        out_features: int,
        bias: bool = True,
        replica_grouping: ReplicaGrouping | None = None,
        group_size: int = 0,
        dim: int = -1,
    ) -> None:
        super().__init__()
        self.out_features = out_features
        self.bias = bias
        self.replica_grouping = replica_grouping
        self.group_size = group_size
        self.dim = dim

    def build(self, x: Tensor) -> Tensor:
        """Shapes: ``[..., in] -> [..., out]``."""
        shape = (x.shape[-1], self.out_features)
        rows, grouped = shape if self.dim in (-1, 1) else shape[::-1]
        size = self.group_size or grouped
        if size % PACKED or grouped % size:
            raise ValueError(
                f"LinearGQ: got group_size {self.group_size} for {grouped} elements on axis "
                f"{self.dim} of a weight {list(shape)}; expected a multiple of {PACKED} that "
                "divides them."
            )
        groups, grouping = (rows, grouped // size), self.replica_grouping
        step = INITIAL_STD / LEVELS_STD
        self.weight = self.add_variable_input(
            "weight",
            lambda: np.random.randint(0, LEVELS**PACKED, (*groups, size // PACKED)).astype(
                np.uint16
            ),
            popxl.uint16,
            replica_grouping=grouping,
        )
        self.group_scale = self.add_variable_input(
            "group_scale", lambda: np.full((*groups, 1), step), x.dtype, replica_grouping=grouping
        )
        self.group_bias = self.add_variable_input(
            "group_bias",
            lambda: np.full((*groups, 1), -step * (LEVELS - 1) / 2),
            x.dtype,
            replica_grouping=grouping,
        )
        y = x @ group_quantize_decompress(self.weight, self.group_scale, self.group_bias, self.dim)
        if self.bias:
            self.b = self.add_variable_input(
                "bias", lambda: np.zeros(self.out_features), x.dtype, replica_grouping=grouping
            )
            y = y + self.b
        return y

    @staticmethod
    def torch_mapping(
        variables: NamedTensors,
        nn_layer: Any,
        dtype: popxl.dtype = popxl.float32,
        group_size: int = 64,
        dim: int = -1,
    ) -> WeightsDict:
        """``{variable: host weight}`` from a torch linear layer, whose weight is transposed and
        packed.

        ``group_size`` and ``dim`` are the layer's.
        """
        weight = to_numpy(to_numpy(nn_layer.weight).T, dtype)
        size = group_size or weight.shape[dim]
        packed, scale, bias = group_quantize_compress_numpy(weight, size, dim)
        weights = WeightsDict(
            {variables.weight: packed, variables.group_scale: scale, variables.group_bias: bias}
        )
        if nn_layer.bias is not None:
            weights[variables.bias] = to_numpy(nn_layer.bias, dtype)
        return weights
