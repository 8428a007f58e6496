"""Pooling, one axis after the other: both the maximum and the sum over a window are taken so. Sums
are in float32.
"""

from collections.abc import Iterator

import torch
from popxl.ops.windows import Window

from popxl_engine.kernels.registry import kernel
from popxl_engine.kernels.rounding import as_float32

Windows = tuple[Window, ...]


def along(axis: int, start: int, stop: int, step: int) -> tuple[slice, ...]:
    """Index of every ``step``-th position from ``start`` to ``stop`` of one axis."""
    return (*[slice(None)] * axis, slice(start, stop, step))


def elements(window: Window, axis: int) -> tuple[slice, ...]:
    """Index of t's elements among the positions that windows cover."""
    return along(axis, window.begin, window.begin + window.extent, window.spacing)


def positions(t: torch.Tensor, axis: int, window: Window, padding: float) -> torch.Tensor:
    """t with padding wherever windows reach beyond its elements; t itself if they do not."""
    length = window.begin + window.extent + max(window.end, 0)
    if length == t.shape[axis]:
        return t
    found = t.new_full((*t.shape[:axis], length, *t.shape[axis + 1 :]), padding)
    found[elements(window, axis)] = t
    return found


def points(covered: torch.Tensor, axis: int, window: Window) -> Iterator[torch.Tensor]:
    """What each point of the window meets at every position: views, of other elements each."""
    for start in range(0, window.span, window.dilation):
        yield covered[
            along(axis, start, start + (window.count - 1) * window.stride + 1, window.stride)
        ]


def axes_of(windows: Windows) -> list[tuple[int, Window]]:
    """(axis, window), last axis first, so that of equal maxima the first in row-major order is met
    first.
    """
    return list(enumerate(windows, 2))[::-1]


def largest(t: torch.Tensor, axis: int, window: Window) -> torch.Tensor:
    """Maxima along one axis, in new memory."""
    first, *others = points(positions(t, axis, window, float("-inf")), axis, window)
    result = first.clone(memory_format=torch.contiguous_format)
    for met in others:
        torch.maximum(result, met, out=result)
    return result


def total(t: torch.Tensor, axis: int, window: Window) -> torch.Tensor:
    """Sums along one axis, in new memory."""
    first, *others = points(positions(t, axis, window, 0.0), axis, window)
    result = first.clone(memory_format=torch.contiguous_format)
    for met in others:
        result += met
    return result


def counts(like: torch.Tensor, axis: int, window: Window) -> torch.Tensor:
    """Elements in each window along one axis, to broadcast against results."""
    ones = like.new_ones([window.size if a == axis else 1 for a in range(like.dim())])
    return total(ones, axis, window)


@kernel("max_pool")
def max_pool(t: torch.Tensor, windows: Windows) -> torch.Tensor:
    """Maxima of maxima."""
    for axis, window in axes_of(windows):
        t = largest(t, axis, window)
    return t


@kernel("average_pool")
def average_pool(t: torch.Tensor, windows: Windows) -> torch.Tensor:
    """Means of means: on each axis, every window's elements count alike on the axes before."""
    result = as_float32(t)
    for axis, window in axes_of(windows):
        result = total(result, axis, window) / counts(result, axis, window)
    return result.to(t.dtype)


@kernel("average_pool_grad")
def average_pool_grad(dy: torch.Tensor, windows: Windows) -> torch.Tensor:
    """Each axis's shares added to what each point met."""
    d = as_float32(dy)
    for axis, window in reversed(axes_of(windows)):
        share = d / counts(d, axis, window)
        d = d.new_zeros((*d.shape[:axis], window.size, *d.shape[axis + 1 :]))
        covered = positions(d, axis, window, 0.0)
        for met in points(covered, axis, window):
            met += share
        d = d if covered is d else covered[elements(window, axis)].contiguous()
    return d.to(dy.dtype)


@kernel("max_pool_grad")
def max_pool_grad(dy: torch.Tensor, t: torch.Tensor, windows: Windows) -> torch.Tensor:
    """Each axis's maxima again; the first point that met one gets its gradient, and nothing is left
    for the others.
    """
    levels = [t]
    for axis, window in axes_of(windows):
        levels.append(largest(levels[-1], axis, window))
    left = as_float32(dy)
    for (axis, window), before, after in reversed(list(zip(axes_of(windows), levels, levels[1:]))):
        left = left.clone()
        met_values = points(positions(before, axis, window, float("-inf")), axis, window)
        d = left.new_zeros(before.shape)
        covered = positions(d, axis, window, 0.0)
        for value, met in zip(met_values, points(covered, axis, window)):
            # a NaN is the maximum
            is_smaller = torch.where(after.isnan(), ~value.isnan(), value < after)
            met += left.masked_fill(is_smaller, 0)
            left.masked_fill_(~is_smaller, 0)
        left = d if covered is d else covered[elements(window, axis)].contiguous()
    return left.to(dy.dtype)
