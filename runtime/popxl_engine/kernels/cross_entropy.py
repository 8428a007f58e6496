"""Log-sum-exp and pick: the parts of a cross entropy that touch every logit."""

from collections.abc import Iterator

import torch

from popxl_engine.kernels.registry import KERNELS, kernel
from popxl_engine.native import library as native

CHUNK = 1 << 20
"""Logits handled at a time: their temporaries then stay in the cache, and wide copies of narrow
logits stay small.
"""
LARGE_CHUNK = 1 << 25
"""The same on a GPU: few launches, each of which fills it; 128 MiB for each wide copy."""
ALIGNED_ROWS = 8
"""Rows of which a chunk on a GPU is a multiple, so that each begins on a boundary of 16 bytes."""


def row_chunks(logits: torch.Tensor) -> Iterator[slice]:
    """Rows that are handled together."""
    columns = max(1, logits.shape[1])
    if logits.is_cpu or native.is_here(logits.device):
        step = max(1, CHUNK // columns)
    else:
        step = max(1, LARGE_CHUNK // columns // ALIGNED_ROWS) * ALIGNED_ROWS
    return (slice(first, first + step) for first in range(0, logits.shape[0], step))


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which logits of a type are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _inside(indices: torch.Tensor, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices as int64, limited to valid ones; which were valid)."""
    wide = indices.to(torch.int64)
    inside = (wide >= 0) & (wide < classes)
    return torch.where(inside, wide, 0), inside


def pick(logits: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Each row's logit at its index, in float32 at least; zero where the index is none of the
    classes.
    """
    at, inside = _inside(indices, logits.shape[1])
    return torch.where(inside, logits.gather(1, at[:, None])[:, 0].to(wide_type(logits.dtype)), 0)


def bounded(t: torch.Tensor, cap: float | None) -> torch.Tensor:
    """cap * tanh(t / cap); without a cap t itself."""
    return t if cap is None else torch.tanh(t / cap) * cap


def losses(
    logits: torch.Tensor, indices: torch.Tensor, cap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp and pick of bounded logits, some rows at a time, in float32 at least."""
    dtype = wide_type(logits.dtype)
    total = torch.empty(logits.shape[0], dtype=dtype, device=logits.device)
    for rows in row_chunks(logits):
        torch.logsumexp(bounded(logits[rows].to(dtype), cap), 1, out=total[rows])
    picked = pick(logits, indices) if logits.shape[1] else torch.zeros_like(total)
    return total, bounded(picked, cap)


@kernel("logsumexp_and_pick")
def logsumexp_and_pick(
    logits: torch.Tensor, indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logsumexp and the pick of logits as they are."""
    return losses(logits, indices)


@kernel("fused_softcap_logsumexp_and_pick")
def softcap_logsumexp_and_pick(
    logits: torch.Tensor, indices: torch.Tensor, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logsumexp and the pick of bounded logits, which are stored nowhere."""
    return losses(logits, indices, cap)


@kernel("fused_softcap_logsumexp_and_pick_grad")
def softcap_logsumexp_and_pick_grad(
    d_logsumexp: torch.Tensor,
    d_picked: torch.Tensor,
    logsumexp: torch.Tensor,
    logits: torch.Tensor,
    indices: torch.Tensor,
    cap: float,
) -> torch.Tensor:
    """The gradient of bounded logits times the slope of the bound, some rows at a time."""
    result = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    operands = (d_logsumexp, d_picked, logsumexp)
    for rows in row_chunks(logits):
        y = bounded(logits[rows].to(wide_type(logits.dtype)), cap)
        dy = logsumexp_and_pick_grad(*(t[rows] for t in operands), y, indices[rows])
        result[rows] = (dy * (1 - (y / cap) ** 2)).to(result.dtype)
    return result


@kernel("logsumexp_and_pick_grad")
def logsumexp_and_pick_grad(
    d_logsumexp: torch.Tensor,
    d_picked: torch.Tensor,
    logsumexp: torch.Tensor,
    logits: torch.Tensor,
    indices: torch.Tensor,
) -> torch.Tensor:
    """exp(logits - logsumexp) * d_logsumexp, plus d_picked at the index; zeros for rows of minus
    infinities.
    """
    dtype = wide_type(logits.dtype)
    result = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    shift = torch.where(torch.isneginf(logsumexp), 0, logsumexp)[:, None]
    scale = d_logsumexp[:, None]
    at, inside = _inside(indices, logits.shape[1])
    at, d_picked = at[:, None], torch.where(inside, d_picked, 0)[:, None]
    for rows in row_chunks(logits):
        if logits.dtype == dtype:
            chunk = torch.sub(logits[rows], shift[rows], out=result[rows])
        else:
            chunk = logits[rows].to(dtype).sub_(shift[rows])
        chunk.exp_().mul_(scale[rows])
        if logits.shape[1]:
            chunk.scatter_add_(1, at[rows], d_picked[rows])
        if chunk.dtype != logits.dtype:
            result[rows] = chunk
    return result


@kernel("fused_cross_entropy_and_grad")
def cross_entropy_and_grad(
    d_logsumexp: torch.Tensor,
    d_picked: torch.Tensor,
    logits: torch.Tensor,
    indices: torch.Tensor,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of bounded logits, and its gradient."""
    prefix, bound = ("", ()) if cap is None else ("fused_softcap_", (cap,))
    loss, grad = (KERNELS[f"{prefix}logsumexp_and_pick{end}"] for end in ("", "_grad"))
    total, picked = loss(logits, indices, *bound)
    return total, picked, grad(d_logsumexp, d_picked, total, logits, indices, *bound)
