"""Combining what shares an index, and gathers that go group by group."""

import torch

from popxl_engine.kernels.dtypes import as_signed, narrowed, widened
from popxl_engine.kernels.indexing import gather, gather_grad, inside_only
from popxl_engine.kernels.registry import kernel

TORCH_REDUCTIONS = {"sum": "sum", "max": "amax", "min": "amin"}
"""torch's names of the reductions."""


def _last(data: torch.Tensor, index: torch.Tensor, start: torch.Tensor, axis: int) -> torch.Tensor:
    """start, overwritten by the last element along the axis of each slot: the same on every
    device.
    """
    positions = torch.arange(data.shape[axis], device=data.device)
    positions = positions.view((-1,) + (1,) * (data.ndim - axis - 1)).expand(data.shape)
    last = torch.full(start.shape, -1, device=data.device).scatter_reduce_(
        axis, index, positions, "amax"
    )
    return torch.where(last >= 0, data.gather(axis, last.clamp(min=0)), start)


@kernel("scatter_reduce")
@inside_only
def scatter_reduce(
    data: torch.Tensor,
    indices: torch.Tensor,
    initial_values: torch.Tensor | None,
    reduction: str,
    axis: int,
    axis_size: int,
) -> torch.Tensor:
    """torch.scatter_reduce; slots without elements or initial values are 0."""
    index = indices.to(torch.int64).expand(data.shape)
    if initial_values is None:
        shape = (*data.shape[:axis], axis_size, *data.shape[axis + 1 :])
        start = torch.zeros(shape, dtype=data.dtype, device=data.device)
    else:
        start = initial_values
    if reduction == "none":
        return _last(as_signed(data), index, as_signed(start), axis).view(data.dtype)
    # zeros change no sum, and torch is faster with them
    takes_start = initial_values is not None or reduction == "sum"
    total = widened(start, reduction).scatter_reduce(
        axis,
        index,
        widened(data, reduction),
        TORCH_REDUCTIONS[reduction],
        include_self=takes_start,
    )
    return narrowed(total, data.dtype, reduction)


@kernel("groupedgather")
def groupedgather(
    t: torch.Tensor, indices: torch.Tensor, axis: int, zero_OOR: bool
) -> torch.Tensor:
    """Group after group."""
    taken = [gather(group, i, axis - 1, None, zero_OOR) for group, i in zip(as_signed(t), indices)]
    shape = (0, *t.shape[1:axis], *indices.shape[1:], *t.shape[axis + 1 :])
    return torch.stack(taken).view(t.dtype) if taken else t.new_empty(shape)


@kernel("groupedgather_grad")
def groupedgather_grad(
    dy: torch.Tensor, indices: torch.Tensor, shape: tuple[int, ...], axis: int, zero_OOR: bool
) -> torch.Tensor:
    """Group after group."""
    gradients = [
        gather_grad(d, i, tuple(shape[1:]), axis - 1, zero_OOR) for d, i in zip(dy, indices)
    ]
    return torch.stack(gradients) if gradients else dy.new_empty(shape)
