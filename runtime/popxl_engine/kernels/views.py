"""Copies between a view that torch cannot give and what it views."""

from collections.abc import Sequence
from typing import Any

import torch
from popxl.ops.shape import resolve_slices

from popxl_engine.kernels.dtypes import as_signed
from popxl_engine.kernels.registry import kernel, kernel_for
from popxl_engine.kernels.shape import select
from popxl_engine.ops.views import Rearrangement


@kernel("fused_refresh_view_")
def refresh_view_(
    t: torch.Tensor, parts: Sequence[torch.Tensor], view: Rearrangement
) -> torch.Tensor:
    """Copy what a view shows to it."""
    return t.copy_(view(kernel_for(view.definition), parts))


@kernel("fused_write_back_")
def write_back_(t: torch.Tensor, y: torch.Tensor, view: Rearrangement, index: int) -> torch.Tensor:
    """Copy a view's elements to the part of this index."""
    args, kwargs = view.with_shapes
    BACK[view.definition.name](t, y, index, *args, **kwargs)
    return t


# (part, view's value, part's index, the op's arguments with shapes in place of tensors)


def back_from_join(
    t: torch.Tensor, y: torch.Tensor, index: int, ts: Sequence[tuple[int, ...]], axis: int
) -> None:
    """The way back to one of the joined tensors."""
    start = sum(shape[axis] for shape in ts[:index])
    as_signed(t).copy_(as_signed(y).narrow(axis, start, ts[index][axis]))


def back_from_shape(t: torch.Tensor, y: torch.Tensor, index: int, *_: Any) -> None:
    """The way back to the tensor that was reshaped."""
    t.copy_(y.reshape(t.shape))


def back_from_slice(
    t: torch.Tensor,
    y: torch.Tensor,
    index: int,
    shape: tuple[int, ...],
    start: Any,
    stop: Any,
    step: Any,
    axis: Any,
) -> None:
    """The way back to the elements that were taken, in reverse too."""
    view, reversed_axes = select(as_signed(t), resolve_slices(shape, start, stop, step, axis))
    view.copy_(as_signed(y).flip(reversed_axes))


BACK = {"concat": back_from_join, "reshape": back_from_shape, "slice": back_from_slice}
