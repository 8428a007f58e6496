"""Convolutions over one to three spatial axes. 16-bit types accumulate in float32.

Three ops are closed under differentiation: a convolution, its transpose, and the gradient of its
weights.
"""

import math
from typing import Any

from popxl.errors import ShapeError
from popxl.opdef import Cost, op
from popxl.ops.checks import check_computes_in_one_dtype, check_floating
from popxl.ops.windows import (
    Numbers,
    PadType,
    Window,
    check_pad_type,
    per_axis,
    resolve_padding,
    slide,
    spatial_sizes,
    split_evenly,
)
from popxl.tensor import Tensor, TensorSpec

Windows = tuple[Window, ...]
MOST_AXES = 3


def _check_shapes(name: str, t: Tensor, weight: Tensor, groups: int, axis: int) -> tuple[int, ...]:
    """t's spatial sizes, if t and weight fit. ``axis``: weight's axis that, divided by groups,
    meets t's channels.
    """
    sizes = spatial_sizes(name, t, MOST_AXES)
    if weight.rank != t.rank or 0 in weight.shape:
        raise ShapeError(
            f"{name}: got weight {weight.spec} for t {t.spec}; expected {t.rank} axes that "
            "are not empty."
        )
    groups_fit = groups >= 1 and t.shape[1] % groups == 0 and weight.shape[0] % groups == 0
    expected = t.shape[1] // groups if groups_fit and axis == 1 else t.shape[1]
    if not groups_fit or weight.shape[axis] != expected:
        form = "[out, channels / groups, ...]" if axis == 1 else "[channels, out / groups, ...]"
        raise ShapeError(
            f"{name}: got weight {weight.spec} and groups {groups} for t {t.spec}; expected "
            f"weight {form} with {t.shape[1]} channels, and groups that divide channels and "
            "outputs."
        )
    return sizes


def conv_windows(
    name: str,
    t: Tensor,
    weight: Tensor,
    stride: Numbers,
    padding: Numbers,
    dilation: Numbers,
    groups: int,
    pad_type: PadType | None,
) -> Windows:
    """The windows of `conv` with these arguments, for operands of any dtype. Its errors, for
    ``name``.
    """
    sizes = _check_shapes(name, t, weight, groups, axis=1)
    return slide(name, sizes, weight.shape[2:], stride, dilation, padding, pad_type)


def conv_transpose_windows(
    name: str,
    t: Tensor,
    weight: Tensor,
    stride: Numbers,
    padding: Numbers,
    dilation: Numbers,
    groups: int,
    pad_type: PadType | None,
    output_padding: Numbers,
    output_shape: Numbers,
) -> Windows:
    """The windows of the convolution that `conv_transpose` with these arguments transposes: it has
    y and makes x.
    """
    sizes = _check_shapes(name, t, weight, groups, axis=0)
    axes = len(sizes)
    strides, dilations = (
        per_axis(name, "stride", stride, axes),
        per_axis(name, "dilation", dilation, axes),
    )
    extra = per_axis(name, "output_padding", output_padding or None, axes, 0, 0)
    shape = _spatial_output(name, t, weight, groups, output_shape) if output_shape else ()
    pads = resolve_padding(name, "padding", padding, axes)
    check_pad_type(name, "pad_type", pad_type, pads)
    if output_shape and any(map(any, pads)):
        raise ShapeError(
            f"{name}: got output_shape {output_shape} and padding {list(pads)}; expected one "
            "of them. Leave one out."
        )
    windows = []
    for axis, (count, points, step, gap, more) in enumerate(
        zip(sizes, weight.shape[2:], strides, dilations, extra)
    ):
        if more >= max(step, gap):
            raise ShapeError(
                f"{name}: got output_padding {more} on spatial axis {axis}; expected less than "
                f"stride {step} or dilation {gap}. Use output_shape for a larger result."
            )
        full = step * (count - 1) + gap * (points - 1) + 1 + more
        begin, end = pads[axis]
        size = full - begin - end
        if output_shape or pad_type in ("same_upper", "same_lower"):
            size = shape[axis] if output_shape else step * count
            begin = split_evenly(max(0, full - size), pad_type)
        if size < 1:
            raise ShapeError(
                f"{name}: got padding {list(pads[axis])} for {full} elements of spatial axis "
                f"{axis}; expected a result that is not empty. Use less padding."
            )
        windows.append(Window(size, points, step, gap, begin, count))
    return tuple(windows)


def _spatial_output(
    name: str, t: Tensor, weight: Tensor, groups: int, output_shape: Numbers
) -> tuple[int, ...]:
    """The sizes behind samples and channels of a transposed convolution's whole result."""
    samples, channels, *sizes = per_axis(
        name, "output_shape", output_shape, t.rank, each="axis of the result"
    )
    expected = (t.shape[0], weight.shape[1] * groups)
    if (samples, channels) != expected:
        raise ShapeError(
            f"{name}: got output_shape {output_shape} for t {t.spec} and weight {weight.spec}; "
            f"expected the result's whole shape, which begins with {expected[0]} samples and "
            f"{expected[1]} channels."
        )
    return tuple(sizes)


@op(name="conv")
def _conv(
    t: Tensor,
    weight: Tensor,
    windows: Windows,
    groups: int,
    available_memory_proportions: list[float] | None = None,
    partials_types: list[str] | None = None,
    enable_conv_dithering: list[int] | None = None,
) -> TensorSpec:
    """A convolution with known windows; `conv` documents it."""
    check_floating("conv", t=t)
    check_computes_in_one_dtype("conv", t=t, weight=weight)
    return TensorSpec((t.shape[0], weight.shape[0], *(w.count for w in windows)), t.dtype)


@op(name="conv_transpose")
def _conv_transpose(
    t: Tensor,
    weight: Tensor,
    windows: Windows,
    groups: int,
    available_memory_proportions: list[float] | None = None,
    partials_types: list[str] | None = None,
    enable_conv_dithering: list[int] | None = None,
) -> TensorSpec:
    """The transpose of the convolution with these windows; `conv_transpose` documents it."""
    check_floating("conv_transpose", t=t)
    check_computes_in_one_dtype("conv_transpose", t=t, weight=weight)
    return TensorSpec((t.shape[0], weight.shape[1] * groups, *(w.size for w in windows)), t.dtype)


@op
def conv_weight_grad(t: Tensor, dy: Tensor, windows: Windows, groups: int) -> TensorSpec:
    """Gradient of the weights of the convolution of t with these windows. Not in PopXL's API.

    Shapes: t [n, c, ...], dy [n, out, ...] -> [out, c / groups, ...].
    """
    return TensorSpec((dy.shape[1], t.shape[1] // groups, *(w.kernel for w in windows)), t.dtype)


@_conv.vjp
def conv_vjp(
    dy: Tensor, y: Tensor, t: Tensor, weight: Tensor, windows: Windows, groups: int, *hints: Any
) -> tuple[Tensor, Tensor]:
    """Transposed for t."""
    return _conv_transpose(dy, weight, windows, groups), conv_weight_grad(t, dy, windows, groups)


@_conv_transpose.vjp
def conv_transpose_vjp(
    dy: Tensor, y: Tensor, t: Tensor, weight: Tensor, windows: Windows, groups: int, *hints: Any
) -> tuple[Tensor, Tensor]:
    """Transposed once more for t; dy takes the place of what was convolved."""
    return _conv(dy, weight, windows, groups), conv_weight_grad(dy, t, windows, groups)


@conv_weight_grad.vjp
def conv_weight_grad_vjp(
    d: Tensor, y: Tensor, t: Tensor, dy: Tensor, windows: Windows, groups: int
) -> tuple[Tensor, Tensor]:
    """d takes the place of the weights."""
    return _conv_transpose(dy, d, windows, groups), _conv(t, d, windows, groups)


def _points(windows: Windows) -> int:
    return math.prod(w.kernel for w in windows)


@_conv.cost
def conv_cost(y: Tensor, t: Tensor, weight: Tensor, windows: Windows, *attributes: Any) -> Cost:
    """A product and a sum for each point of the window, and each channel of the group, of each
    element.
    """
    return Cost(flops=2 * y.nelms * weight.shape[1] * _points(windows))


@_conv_transpose.cost
def conv_transpose_cost(
    y: Tensor, t: Tensor, weight: Tensor, windows: Windows, *attributes: Any
) -> Cost:
    """A product and a sum for each point of the window, and each output of the group, of each of
    t's elements.
    """
    return Cost(flops=2 * t.nelms * weight.shape[1] * _points(windows))


@conv_weight_grad.cost
def conv_weight_grad_cost(y: Tensor, t: Tensor, dy: Tensor, windows: Windows, groups: int) -> Cost:
    """FLOPs, as many as of the convolution."""
    return Cost(flops=2 * dy.nelms * (t.shape[1] // groups) * _points(windows))


def conv(
    t: Tensor,
    weight: Tensor,
    stride: Numbers = (1, 1),
    padding: Numbers = (0, 0, 0, 0),
    dilation: Numbers = (1, 1),
    groups: int = 1,
    pad_type: PadType = "not_set",
    available_memory_proportions: list[float] | None = None,
    partials_types: list[str] | None = None,
    enable_conv_dithering: list[int] | None = None,
) -> Tensor:
    """Convolution (cross-correlation: the weights are not flipped) over one to three spatial axes.

    Shapes: t [n, c, x...], weight [out, c / groups, k...], one floating-point type -> [n, out,
    y...] with y = floor((x + padding - dilation * (k - 1) - 1) / stride) + 1 on each spatial axis.
    Args:
        stride: elements from one window to the next, for each spatial axis; None: 1.
        padding: zeros around t: the begins of all spatial axes, then the ends; None: 0. For images:
            top, left, bottom, right.
        dilation: elements from one point of the weights to the next, for each spatial axis; None:
            1.
        groups: how many equal groups of channels, each with its own outputs.
        pad_type: 'not_set': as padding says; 'valid': none; 'same_upper' or 'same_lower': as much
            as makes y = ceil(x / stride), halves on both sides, the odd one behind or before.
        available_memory_proportions, partials_types, enable_conv_dithering: kept; have no effect
            here.
    Raises:
        ShapeError: if t, weight and groups do not fit, an argument has not one number for each
            axis, both padding and a pad_type are given, or no window fits.
        DTypeError: from sessions, if the dtypes differ or are not floating point.
        ValueError: for another pad_type.
    """
    windows = conv_windows("conv", t, weight, stride, padding, dilation, groups, pad_type)
    return _conv(
        t,
        weight,
        windows,
        groups,
        available_memory_proportions,
        partials_types,
        enable_conv_dithering,
    )


def conv_transpose(
    t: Tensor,
    weight: Tensor,
    stride: Numbers = (1, 1),
    padding: Numbers = (0, 0, 0, 0),
    dilation: Numbers = (1, 1),
    groups: int = 1,
    pad_type: PadType = "not_set",
    output_padding: Numbers = (),
    output_shape: Numbers = (),
    available_memory_proportions: list[float] | None = None,
    partials_types: list[str] | None = None,
    enable_conv_dithering: list[int] | None = None,
) -> Tensor:
    """The transpose of a convolution: each element of t adds its multiple of the weights to the
    result.

    Shapes: t [n, c, x...], weight [c, out / groups, k...], one floating-point type -> [n, out,
    y...] with y = stride * (x - 1) + dilation * (k - 1) + 1 + output_padding - padding on each
    spatial axis.
    Args:
        stride: elements of the result from one of t's to the next, for each spatial axis; None: 1.
        padding: elements cut from the result: the begins of all spatial axes, then the ends; None:
            0.
        dilation: elements from one point of the weights to the next, for each spatial axis; None:
            1.
        groups: how many equal groups of channels, each with its own outputs.
        pad_type: 'not_set': as padding says; 'valid': none; 'same_upper' or 'same_lower': y =
            stride * x.
        output_padding: elements added at the end of each spatial axis, fewer than stride or
            dilation; (): 0.
        output_shape: the result's whole shape, samples and channels among it. The padding follows
            from it, halves on both sides, the odd one behind for 'same_upper' and before otherwise;
            where t does not reach so far, zeros follow. (): as padding says.
        available_memory_proportions, partials_types, enable_conv_dithering: kept; have no effect
            here.
    Raises:
        ShapeError: if t, weight and groups do not fit, an argument has not one number for each
            axis, padding is given together with a pad_type or output_shape, or the result would be
            empty.
        DTypeError: from sessions, if the dtypes differ or are not floating point.
        ValueError: for another pad_type.
    """
    name = "conv_transpose"
    windows = conv_transpose_windows(
        name, t, weight, stride, padding, dilation, groups, pad_type, output_padding, output_shape
    )
    return _conv_transpose(t, weight, windows, groups, available_memory_proportions, partials_types,
                           enable_conv_dithering)  # fmt: skip
