"""Convolutions of float8 tensors with a scale. Products are exact, sums are float32, the result is
rounded once.
"""

from typing import Any

from popxl import dtypes
from popxl.opdef import Cost, op
from popxl.ops.checks import check_float8, check_log2_scale
from popxl.ops.convolution import (
    Windows,
    conv_cost,
    conv_transpose_cost,
    conv_transpose_windows,
    conv_windows,
)
from popxl.ops.windows import Numbers, PadType
from popxl.tensor import Tensor, TensorSpec


@op(name="conv_pow2scaled", differentiable=False)
def _conv_pow2scaled(
    t: Tensor,
    weight: Tensor,
    log2_scale: Tensor,
    windows: Windows,
    groups: int,
    available_memory_proportions: list[float] | None,
    enable_conv_dithering: list[int] | None,
) -> TensorSpec:
    """A scaled convolution with known windows; `conv_pow2scaled` documents it."""
    check_float8("conv_pow2scaled", t=t, weight=weight)
    check_log2_scale("conv_pow2scaled", log2_scale)
    return TensorSpec((t.shape[0], weight.shape[0], *(w.count for w in windows)), dtypes.float16)


@op(name="conv_transpose_pow2scaled", differentiable=False)
def _conv_transpose_pow2scaled(
    t: Tensor,
    weight: Tensor,
    log2_scale: Tensor,
    windows: Windows,
    groups: int,
    available_memory_proportions: list[float] | None,
    enable_conv_dithering: list[int] | None,
) -> TensorSpec:
    """The transpose of the scaled convolution with these windows; `conv_transpose_pow2scaled`
    documents it.
    """
    check_float8("conv_transpose_pow2scaled", t=t, weight=weight)
    check_log2_scale("conv_transpose_pow2scaled", log2_scale)
    return TensorSpec(
        (t.shape[0], weight.shape[1] * groups, *(w.size for w in windows)), dtypes.float16
    )


@_conv_pow2scaled.cost
def conv_pow2scaled_cost(
    y: Tensor, t: Tensor, weight: Tensor, log2_scale: Tensor, windows: Windows, *attributes: Any
) -> Cost:
    """The cost of the convolution."""
    return conv_cost(y, t, weight, windows)


@_conv_transpose_pow2scaled.cost
def conv_transpose_pow2scaled_cost(
    y: Tensor, t: Tensor, weight: Tensor, log2_scale: Tensor, windows: Windows, *attributes: Any
) -> Cost:
    """The cost of the transposed convolution."""
    return conv_transpose_cost(y, t, weight, windows)


def conv_pow2scaled(
    t: Tensor,
    weight: Tensor,
    log2_scale: Tensor,
    stride: Numbers = (1, 1),
    padding: Numbers = (0, 0, 0, 0),
    dilation: Numbers = (1, 1),
    groups: int = 1,
    pad_type: PadType = "not_set",
    available_memory_proportions: list[float] | None = None,
    enable_conv_dithering: list[int] | None = None,
) -> Tensor:
    """`conv` of float8 tensors times ``2**log2_scale``, accumulated in float32 and rounded once to
    float16.

    Shapes: as for `conv`; t and weight float8, of one or both types; log2_scale [], int32 ->
        float16.
    Args:
        log2_scale: from -32 to 31; another value is a ValueError when the program runs.
        stride, padding, dilation, groups, pad_type: as for `conv`.
        available_memory_proportions, enable_conv_dithering: kept; have no effect here.
    Raises:
        ShapeError, ValueError: as `conv`, or if the scale is not a scalar.
        DTypeError: if an operand is not float8, or the scale is not int32.
    """
    windows = conv_windows(
        "conv_pow2scaled", t, weight, stride, padding, dilation, groups, pad_type
    )
    return _conv_pow2scaled(
        t, weight, log2_scale, windows, groups, available_memory_proportions, enable_conv_dithering
    )


def conv_transpose_pow2scaled(
    t: Tensor,
    weight: Tensor,
    log2_scale: Tensor,
    stride: Numbers = (1, 1),
    padding: Numbers = (0, 0, 0, 0),
    dilation: Numbers = (1, 1),
    groups: int = 1,
    pad_type: PadType = "not_set",
    output_padding: Numbers = (),
    output_shape: Numbers = (),
    available_memory_proportions: list[float] | None = None,
    enable_conv_dithering: list[int] | None = None,
) -> Tensor:
    """`conv_transpose` of float8 tensors times ``2**log2_scale``, accumulated in float32 and
    rounded once to float16.

    Shapes: as for `conv_transpose`; t and weight float8, of one or both types; log2_scale [], int32
        -> float16.
    Args:
        log2_scale: from -32 to 31; another value is a ValueError when the program runs.
        stride, padding, dilation, groups, pad_type, output_padding, output_shape: as for
            `conv_transpose`.
        available_memory_proportions, enable_conv_dithering: kept; have no effect here.
    Raises:
        ShapeError, ValueError: as `conv_transpose`, or if the scale is not a scalar.
        DTypeError: if an operand is not float8, or the scale is not int32.
    """
    windows = conv_transpose_windows(
        "conv_transpose_pow2scaled",
        t,
        weight,
        stride,
        padding,
        dilation,
        groups,
        pad_type,
        output_padding,
        output_shape,
    )
    return _conv_transpose_pow2scaled(
        t, weight, log2_scale, windows, groups, available_memory_proportions, enable_conv_dithering
    )
