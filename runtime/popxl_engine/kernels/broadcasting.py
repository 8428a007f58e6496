"""Broadcasting and its inverse."""

import torch

from popxl_engine.kernels.dtypes import LIMITED
from popxl_engine.kernels.registry import kernel


@kernel("broadcast_to")
def broadcast_to(
    t: torch.Tensor, shape: tuple[int, ...], new_axes: tuple[int, ...]
) -> torch.Tensor:
    """t repeated to shape, in memory of its own."""
    for axis in new_axes:
        t = t.unsqueeze(axis)
    return t.expand(shape).clone(memory_format=torch.contiguous_format)


@kernel("sum_to")
def sum_to(t: torch.Tensor, shape: tuple[int, ...], dropped: tuple[int, ...]) -> torch.Tensor:
    """t summed over what `broadcast_to` repeats; 16-bit types sum in float32."""
    kept = list(shape)
    for axis in dropped:
        kept.insert(axis, 1)
    padded = [1] * (t.dim() - len(kept)) + kept
    axes = [axis for axis in range(t.dim()) if padded[axis] == 1 and t.shape[axis] != 1]
    if not axes:
        return t.reshape(shape).clone()
    if t.dtype in LIMITED:
        return t.to(torch.int64).sum(axes).to(t.dtype).reshape(shape)
    return t.sum(axes, dtype=t.dtype).reshape(shape)
