"""Pooling: one number from the elements in each window, over any number of spatial axes. Padding
does not count.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

from popxl.errors import ShapeError
from popxl.opdef import Cost, op
from popxl.ops.checks import check_floating
from popxl.ops.shape import slice_grad
from popxl.ops.windows import (
    Numbers,
    PadType,
    Window,
    per_axis,
    resolve_padding,
    slide,
    spatial_sizes,
)
from popxl.tensor import Tensor, TensorSpec

Windows = tuple[Window, ...]


def _pooled(name: str, t: Tensor, windows: Windows) -> TensorSpec:
    check_floating(name, t=t)
    return TensorSpec((*t.shape[:2], *(w.count for w in windows)), t.dtype)


@op(name="average_pool")
def _average_pool(t: Tensor, windows: Windows) -> TensorSpec:
    """Means over known windows; `average_pool` documents it."""
    return _pooled("average_pool", t, windows)


@op
def average_pool_grad(dy: Tensor, windows: Windows) -> TensorSpec:
    """Gradient of `average_pool`: each window's gradient to its elements, in equal shares. Not in
    PopXL's API.
    """
    return TensorSpec((*dy.shape[:2], *(w.size for w in windows)), dy.dtype)


@op(name="max_pool")
def _max_pool(t: Tensor, windows: Windows) -> TensorSpec:
    """Maxima over known windows; `max_pool` documents it."""
    return _pooled("max_pool", t, windows)


@op(differentiable=False)
def max_pool_grad(dy: Tensor, t: Tensor, windows: Windows) -> TensorSpec:
    """Gradient of `max_pool`: each window's gradient to the first of its largest elements. Not in
    PopXL's API.
    """
    return t.spec


@_average_pool.vjp
def average_pool_vjp(dy: Tensor, y: Tensor, t: Tensor, windows: Windows) -> Tensor:
    """Equal shares."""
    return average_pool_grad(dy, windows)


@average_pool_grad.vjp
def average_pool_grad_vjp(d: Tensor, y: Tensor, dy: Tensor, windows: Windows) -> Tensor:
    """Pooling is linear."""
    return _average_pool(d, windows)


@_max_pool.vjp
def max_pool_vjp(dy: Tensor, y: Tensor, t: Tensor, windows: Windows) -> Tensor:
    """One op; it computes the maxima again."""
    return max_pool_grad(dy, t, windows)


def _points(windows: Windows) -> int:
    return math.prod(w.kernel for w in windows)


_average_pool.cost(lambda y, t, windows: Cost(flops=y.nelms * _points(windows)))
_max_pool.cost(lambda y, t, windows: Cost(flops=y.nelms * _points(windows)))
average_pool_grad.cost(lambda dt, dy, windows: Cost(flops=dy.nelms * _points(windows)))
max_pool_grad.cost(lambda dt, dy, t, windows: Cost(flops=2 * dy.nelms * _points(windows)))


def _pool(
    name: str,
    pool: Callable[[Tensor, Windows], Tensor],
    t: Tensor,
    kernel_size: Numbers,
    out_pads: Numbers,
    auto_pad: PadType | None,
    **windows: Any,
) -> Tensor:
    sizes = spatial_sizes(name, t)
    kernel = per_axis(name, "kernel_size", () if kernel_size is None else kernel_size, len(sizes))
    around = resolve_padding(name, "out_pads", out_pads, len(sizes))
    found = slide(name, sizes, kernel, pad_type=auto_pad, parameter="auto_pad", **windows)
    for axis, window in enumerate(found):
        if window.fewest == 0:
            raise ShapeError(
                f"{name}: got a window without any element of t {t.spec} on spatial axis {axis}; "
                "expected at least one in each, because padding does not count. Use less "
                "padding, or a larger kernel."
            )
    y = pool(t, found)
    if not any(map(any, around)):
        return y
    begins = [begin for begin, _ in around]
    shape = (*y.shape[:2], *(begin + n + end for n, (begin, end) in zip(y.shape[2:], around)))
    stops = [begin + n for n, begin in zip(y.shape[2:], begins)]
    return slice_grad(y, shape, begins, stops, None, list(range(2, y.rank)))


_ARGUMENTS = """
    Shapes: t [n, c, x...], floating point -> [n, c, y...], t's dtype, with
    y = floor((x + padding - dilation * (kernel_size - 1) - 1) / stride) + 1 on each spatial axis.
    Args:
        kernel_size: elements of a window, for each spatial axis.
        stride: elements from one window to the next; None: 1, not kernel_size.
        padding: places around t that windows may cover: the begins of all spatial axes, then the
            ends; None: 0. They hold nothing: padding neither wins nor counts.
        out_pads: zeros around the result, as padding; None: 0.
        dilation: elements from one point of a window to the next; None: 1.
        in_dilations: places from one of t's elements to the next, with padding in between; None: 1.
        auto_pad: 'not_set': as padding says; 'valid': none; 'same_upper' or 'same_lower': as much
            as makes y = ceil(x / stride), halves on both sides, the odd one behind or before.
        ceil_mode: whether a last window may reach beyond the end of the padding, if it starts
            before.{more}
    Raises:
        ShapeError: if an argument has not one number for each axis, both padding and an auto_pad
            are given, or a window would hold no element.
        DTypeError: from sessions, if t is not floating point.
        ValueError: for another auto_pad{or_}.
    """


def average_pool(
    t: Tensor,
    kernel_size: Numbers,
    stride: Numbers = None,
    padding: Numbers = None,
    out_pads: Numbers = None,
    dilation: Numbers = None,
    in_dilations: Numbers = None,
    auto_pad: PadType = "not_set",
    ceil_mode: bool = False,
) -> Tensor:
    """The mean of the elements in each window."""
    return _pool(
        "average_pool",
        _average_pool,
        t,
        kernel_size,
        out_pads,
        auto_pad,
        stride=stride,
        padding=padding,
        dilation=dilation,
        spacing=in_dilations,
        ceil_mode=ceil_mode,
    )


def max_pool(
    t: Tensor,
    kernel_size: Numbers,
    stride: Numbers = None,
    padding: Numbers = None,
    out_pads: Numbers = None,
    dilation: Numbers = None,
    in_dilations: Numbers = None,
    auto_pad: PadType = "not_set",
    ceil_mode: bool = False,
    storage_order: Literal["row", "column"] = "row",
) -> Tensor:
    """The largest element in each window. Of equal ones the first, in row-major order, gets the
    gradient.
    """
    if storage_order not in ("row", "column"):
        raise ValueError(
            f"max_pool: got storage_order = {storage_order!r}; expected 'row' or 'column'."
        )
    return _pool(
        "max_pool",
        _max_pool,
        t,
        kernel_size,
        out_pads,
        auto_pad,
        stride=stride,
        padding=padding,
        dilation=dilation,
        spacing=in_dilations,
        ceil_mode=ceil_mode,
    )


average_pool.__doc__ = f"{average_pool.__doc__}\n{_ARGUMENTS.format(more='', or_='')}"
max_pool.__doc__ = f"{max_pool.__doc__}\n" + _ARGUMENTS.format(
    more="\n        storage_order: order of the maxima's positions, which are not returned: "
    "without effect here.",
    or_=" or storage_order",
)
