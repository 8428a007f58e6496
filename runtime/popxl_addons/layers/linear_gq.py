"""Affine map of the last axis, with a weight in four bits."""

from typing import Any

import numpy as np
import popxl
from popxl import ReplicaGrouping, Tensor
from popxl.utils import to_numpy

from popxl_addons.module import Module
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.ops.group_quantize_decompress.group_quantize_decompress import (
    PACKED,
    group_quantize_compress_numpy,
    group_quantize_decompress,
)
from popxl_addons.utils import WeightsDict


class LinearGQ(Module):
    """``x @ weight + bias`` with a weight [in, out] that is kept packed, and unpacked whenever it
    is used.

    Variables: ``weight_compressed`` [a, groups, group_size/4], uint16;
    ``weight_decompression_scale`` and ``weight_decompression_bias`` [a, groups, 1]; ``bias`` [out].
    Groups lie along the axis ``dim`` of [in, out]; a is the other axis. All are zeros at first,
    until a `torch_mapping` fills them. The packed weight has no gradient; the other variables and x
    do.

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
        groups = (rows, grouped // size)

        def variable(name: str, shape: tuple[int, ...], dtype: popxl.dtype) -> Tensor:
            return self.add_variable_input(
                name, lambda: np.zeros(shape), dtype, replica_grouping=self.replica_grouping
            )

        weight = variable("weight_compressed", (*groups, size // PACKED), popxl.uint16)
        scale = variable("weight_decompression_scale", (*groups, 1), x.dtype)
        shift = variable("weight_decompression_bias", (*groups, 1), x.dtype)
        y = x @ group_quantize_decompress(weight, scale, shift, self.dim)
        return y + variable("bias", (self.out_features,), x.dtype) if self.bias else y

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
        weights = WeightsDict({variables.weight_compressed: packed})
        weights[variables.weight_decompression_scale] = to_numpy(scale, dtype)
        weights[variables.weight_decompression_bias] = to_numpy(bias, dtype)
        if nn_layer.bias is not None:
            weights[variables.bias] = to_numpy(nn_layer.bias, dtype)
        return weights
