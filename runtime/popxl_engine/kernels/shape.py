"""Rearranging elements. Kernels return views wherever torch has them."""

from collections.abc import Sequence
from typing import Any

import torch
from popxl.ops.shape import resolve_slices

from popxl_engine.kernels.dtypes import as_signed
from popxl_engine.kernels.registry import kernel


@kernel("reshape")
def reshape(t: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A view of contiguous elements, else a copy."""
    # torch reads numbers faster than a tuple of them
    return t.reshape(*shape) if shape else t.reshape(())


@kernel("transpose")
def transpose(t: torch.Tensor, permutation: tuple[int, ...] | None) -> torch.Tensor:
    """A view with other strides."""
    order = tuple(reversed(range(t.dim()))) if permutation is None else permutation
    return t.permute(*order) if t.dim() else t


@kernel("squeeze")
def squeeze(t: torch.Tensor, axes: list[int] | None) -> torch.Tensor:
    """A view with fewer axes."""
    return t.squeeze() if axes is None else t.squeeze(tuple(axes))


def select(t: torch.Tensor, slices: Sequence[slice]) -> tuple[torch.Tensor, list[int]]:
    """(view of the elements that Python slices name, axes on which it is in reverse): torch has no
    negative strides.
    """
    ascending, reversed_axes = [], []
    for axis, (s, size) in enumerate(zip(slices, t.shape)):
        start, stop, step = s.indices(size)
        if step < 0:
            positions = range(start, stop, step)[::-1]
            start, stop, step = positions.start, positions.stop, positions.step
            reversed_axes.append(axis)
        ascending.append(slice(start, stop, step))
    return t[tuple(ascending)], reversed_axes


@kernel("slice")
def slice_elements(t: torch.Tensor, start: Any, stop: Any, step: Any, axis: Any) -> torch.Tensor:
    """A view; a copy where a step is negative."""
    view, reversed_axes = select(t, resolve_slices(t.shape, start, stop, step, axis))
    return as_signed(view).flip(reversed_axes).view(t.dtype) if reversed_axes else view


@kernel("slice_grad")
def slice_grad(
    dy: torch.Tensor, shape: tuple[int, ...], start: Any, stop: Any, step: Any, axis: Any
) -> torch.Tensor:
    """Zeros with dy in place."""
    result = torch.zeros(tuple(shape), dtype=dy.dtype, device=dy.device)
    view, reversed_axes = select(result, resolve_slices(shape, start, stop, step, axis))
    view.copy_(as_signed(dy).flip(reversed_axes).view(dy.dtype) if reversed_axes else dy)
    return result


@kernel("split")
def split(t: torch.Tensor, splits: int | tuple[int, ...], axis: int) -> tuple[torch.Tensor, ...]:
    """Views of the pieces."""
    if not isinstance(splits, tuple):
        splits = (t.shape[axis] // int(splits),) * int(splits)
    return t.split_with_sizes(splits, axis)


@kernel("concat")
def concat(ts: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    """A joined copy."""
    return torch.cat(list(ts), axis)


@kernel("identity")
def identity(t: torch.Tensor, output_name: str | None) -> torch.Tensor:
    """The same elements."""
    return t


@kernel("detach")
def detach(t: torch.Tensor) -> torch.Tensor:
    """The same elements."""
    return t
