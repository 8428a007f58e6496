"""Convolution of images."""

from typing import Any

import numpy as np
import popxl
from popxl import ReplicaGrouping, Tensor, ops
from popxl.utils import to_numpy

from popxl_addons.layers.initial import truncated_normal
from popxl_addons.module import Module
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.utils import WeightsDict


class Conv2D(Module):
    """`ops.conv` with ``weight`` [out, in / groups, rows, columns] (truncated normal, 0.02) and
    ``bias`` [out] (zero).

    Args:
        kernel_size: (rows, columns), or one number for both.
        strides, dilations, groups: as in `ops.conv`.
        paddings: (top, left, bottom, right), or a pad type of `ops.conv`: "valid", "same_upper",
            "same_lower".
        available_memory_proportions, partials_types, enable_conv_dithering: kept; have no effect
            here.
        replica_grouping: replicas that share the variables; default: all.
    """

    def __init__(
        self,
        out_channels: int,
        kernel_size: tuple[int, int] | int,
        strides: tuple[int, ...] | None = (1, 1),
        paddings: str | tuple[int, ...] | None = (0, 0, 0, 0),
        dilations: tuple[int, ...] | None = (1, 1),
        groups: int = 1,
        bias: bool = True,
        available_memory_proportions: list[float] | None = None,
        partials_types: list[str] | None = None,
        enable_conv_dithering: list[int] | None = None,
        replica_grouping: ReplicaGrouping | None = None,
    ) -> None:
        super().__init__()
        self.out_channels = out_channels
        self.kernel_size = (
            (kernel_size, kernel_size) if isinstance(kernel_size, int) else tuple(kernel_size)
        )
        self.strides = strides
        self.paddings = paddings
        self.dilations = dilations
        self.groups = groups
        self.bias = bias
        self.available_memory_proportions = available_memory_proportions
        self.partials_types = partials_types
        self.enable_conv_dithering = enable_conv_dithering
        self.replica_grouping = replica_grouping

    def build(self, x: Tensor) -> Tensor:
        """Shapes: ``[n, in, h, w] -> [n, out, h', w']``. ValueError for another rank, or what
        `ops.conv` refuses.
        """
        if x.rank != 4:
            raise ValueError(
                f"Conv2D: got x {x.spec}; expected four axes [n, channels, rows, columns]. "
                "Reshape it first."
            )
        shape = (self.out_channels, x.shape[1] // self.groups, *self.kernel_size)
        self.weight = self.add_variable_input(
            "weight",
            lambda: truncated_normal(shape),
            x.dtype,
            replica_grouping=self.replica_grouping,
        )
        padding = (
            {"pad_type": self.paddings}
            if isinstance(self.paddings, str)
            else {"padding": self.paddings}
        )
        y = ops.conv(
            x,
            self.weight,
            self.strides,
            dilation=self.dilations,
            groups=self.groups,
            available_memory_proportions=self.available_memory_proportions,
            partials_types=self.partials_types,
            enable_conv_dithering=self.enable_conv_dithering,
            **padding,
        )
        if self.bias:
            self.b = self.add_variable_input(
                "bias",
                lambda: np.zeros(self.out_channels),
                x.dtype,
                replica_grouping=self.replica_grouping,
            )
            y = y + ops.reshape(self.b, (-1, 1, 1))
        return y

    @staticmethod
    def torch_mapping(
        variables: NamedTensors, nn_layer: Any, dtype: popxl.dtype = popxl.float32
    ) -> WeightsDict:
        """``{variable: host weight}`` from a torch convolution, whose weight has the same form."""
        weights = WeightsDict({variables.weight: to_numpy(nn_layer.weight, dtype)})
        if nn_layer.bias is not None:
            weights[variables.bias] = to_numpy(nn_layer.bias, dtype)
        return weights
