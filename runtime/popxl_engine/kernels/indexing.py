"""Reading and writing at computed positions."""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from popxl_engine.kernels.dtypes import as_signed, from_ordered, ordered
from popxl_engine.kernels.registry import kernel

LOW_PRECISION = (torch.float16, torch.bfloat16)


OUTSIDE = re.compile(r"index (-?\d+) is out of bounds for dimension (\d+) with size (\d+)")
"""What torch says on CPUs. On a GPU, which nobody waits for, it is an assertion of the device."""


def inside_only(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A kernel that takes and puts single elements, with an error in words for indices outside."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        try:
            return fn(*args, **kwargs)
        except RuntimeError as error:
            if (found := OUTSIDE.search(str(error))) is None:
                raise
            index, axis, size = found.groups()
            raise IndexError(
                f"got index {index} on axis {axis} of {size}; expected 0 <= index < {size}. Clip "
                "indices with ops.clip."
            ) from None

    return run


def _inside(indices: torch.Tensor, size: int) -> torch.Tensor:
    return (indices >= 0) & (indices < size)


def _along(flags: torch.Tensor, axis: int, rank: int) -> torch.Tensor:
    """Flags for one axis, to broadcast against a tensor of ``rank`` axes."""
    return flags.view((-1,) + (1,) * (rank - axis - 1))


@kernel("gather")
def gather(
    t: torch.Tensor,
    indices: torch.Tensor,
    axis: int,
    available_memory_proportion: float | None,
    zero_OOR: bool,
) -> torch.Tensor:
    """Select along the axis. Indices outside stand for the nearest one inside, or for zeros if
    asked for.
    """
    axis %= t.ndim
    shape = (*t.shape[:axis], *indices.shape, *t.shape[axis + 1 :])
    if not t.shape[axis]:
        return torch.zeros(shape, dtype=t.dtype, device=t.device)
    source, flat = as_signed(t), indices.reshape(-1).to(torch.int64)
    taken = source.index_select(axis, flat.clamp(0, t.shape[axis] - 1))
    if zero_OOR:
        inside = _inside(flat, t.shape[axis])
        taken = torch.where(
            _along(inside, axis, t.ndim), taken, torch.zeros((), dtype=taken.dtype, device=t.device)
        )
    return taken.view(t.dtype).reshape(shape)


@kernel("gather_grad")
def gather_grad(
    dy: torch.Tensor, indices: torch.Tensor, shape: tuple[int, ...], axis: int, zero_OOR: bool
) -> torch.Tensor:
    """Add slice after slice into zeros; on CPUs in the order of the indices."""
    axis %= len(shape)
    if not shape[axis]:
        return torch.zeros(tuple(shape), dtype=dy.dtype, device=dy.device)
    flat = indices.reshape(-1).to(torch.int64)
    slices = dy.reshape((*shape[:axis], flat.numel(), *shape[axis + 1 :]))
    total = torch.float32 if dy.dtype in LOW_PRECISION else dy.dtype
    slices = slices.to(total)
    if zero_OOR:
        inside = _inside(flat, shape[axis])
        slices = torch.where(
            _along(inside, axis, len(shape)), slices, torch.zeros((), dtype=total, device=dy.device)
        )
    flat = flat.clamp(0, shape[axis] - 1)
    return (
        torch.zeros(tuple(shape), dtype=total, device=dy.device)
        .index_add_(axis, flat, slices)
        .to(dy.dtype)
    )


@kernel("scatter")
@inside_only
def scatter(
    t: torch.Tensor,
    indices: torch.Tensor,
    values: torch.Tensor,
    axis: int,
    available_memory_proportion: float | None,
) -> torch.Tensor:
    """torch.scatter."""
    return as_signed(t).scatter(axis, indices.to(torch.int64), as_signed(values)).view(t.dtype)


@kernel("take_along_axis")
@inside_only
def take_along_axis(t: torch.Tensor, indices: torch.Tensor, axis: int) -> torch.Tensor:
    """torch.gather."""
    return as_signed(t).gather(axis, indices.to(torch.int64)).view(t.dtype)


@kernel("add_along_axis")
@inside_only
def add_along_axis(
    dy: torch.Tensor, indices: torch.Tensor, shape: tuple[int, ...], axis: int
) -> torch.Tensor:
    """torch.scatter_add into zeros; 16-bit types in float32."""
    total = torch.float32 if dy.dtype in LOW_PRECISION else dy.dtype
    result = torch.zeros(tuple(shape), dtype=total, device=dy.device)
    return result.scatter_add_(axis, indices.to(torch.int64), dy.to(total)).to(dy.dtype)


@kernel("topk")
def topk(
    t: torch.Tensor,
    k: int,
    axis: int,
    largest: bool,
    sorted: bool,  # noqa: A002 - the op's name for it
    available_memory_proportion: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch.topk."""
    values, positions = torch.topk(ordered(t), k, axis, largest, sorted)
    return from_ordered(values, t.dtype), positions.to(torch.int32)


@kernel("where")
def where(condition: torch.Tensor, lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """torch.where."""
    return torch.where(condition.to(torch.bool), as_signed(lhs), as_signed(rhs)).view(lhs.dtype)


@kernel("where", device="cpu", over="lhs")
def where_by_one(
    condition: torch.Tensor,
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """`where` that copies what one condition chooses, if it is not in its place already."""
    is_one = condition.numel() == 1 and condition.ndim <= lhs.ndim
    if not is_one or rhs.shape not in (lhs.shape, ()):
        return where(condition, lhs, rhs)
    chosen = lhs if condition.to(torch.bool) else rhs
    if into is None:
        return lhs.new_empty(lhs.shape).copy_(chosen)
    return into if chosen is lhs else into.copy_(rhs)


@kernel("onehot")
def onehot(t: torch.Tensor, num_classes: int, values: torch.Tensor, axis: int) -> torch.Tensor:
    """Compare with every class, choose a value."""
    axis %= t.ndim + 1
    classes = torch.arange(num_classes, device=t.device).view((-1,) + (1,) * (t.ndim - axis))
    off, on = as_signed(values).unbind()
    return torch.where(t.to(torch.int64).unsqueeze(axis) == classes, on, off).view(values.dtype)


def _window(
    t: torch.Tensor, index: torch.Tensor, axes: Iterable[int], sizes: Iterable[int]
) -> torch.Tensor:
    """The view at a position that is read on the host. IndexError if it reaches beyond t."""
    for axis, start, size in zip(axes, map(int, index.reshape(-1)), sizes):
        if not 0 <= start <= t.shape[axis] - size:
            raise IndexError(
                f"got start {start} on axis {axis} for a slice of {size}; expected 0 <= start <= "
                f"{t.shape[axis] - size}."
            )
        t = t.narrow(axis, start, size)
    return t


@kernel("dynamic_slice")
def dynamic_slice(
    t: torch.Tensor, index: torch.Tensor, axes: list[int], sizes: list[int], no_overlap: bool
) -> torch.Tensor:
    """A view of the slice."""
    return _window(t, index, axes, sizes)


@kernel("dynamic_update_")
def dynamic_update_(
    t: torch.Tensor,
    index: torch.Tensor,
    t_update: torch.Tensor,
    axes: Any,
    sizes: Any,
    no_overlap: bool,
) -> torch.Tensor:
    """Copy into the slice."""
    _window(t, index, axes, sizes).copy_(t_update)
    return t


@kernel("dynamic_update")
def dynamic_update(
    t: torch.Tensor,
    index: torch.Tensor,
    t_update: torch.Tensor,
    axes: Any,
    sizes: Any,
    no_overlap: bool,
) -> torch.Tensor:
    """A copy, then the slice."""
    return dynamic_update_(t.clone(), index, t_update, axes, sizes, no_overlap)
