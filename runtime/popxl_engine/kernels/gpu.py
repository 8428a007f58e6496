"""Faster kernels for GPUs: few passes over memory, and nobody waits for a number of the device."""

from typing import Any

import torch

from popxl_engine.kernels.compiled import one_pass, one_pass_of_each_size
from popxl_engine.kernels.cross_entropy import bounded, losses, pick, row_chunks, wide_type
from popxl_engine.kernels.linalg import rows_on_boundaries
from popxl_engine.kernels.registry import kernel
from popxl_engine.kernels.rounding import update
from popxl_engine.kernels.var_updates import is_plain, working


@kernel("accumulate_mean_", device="cuda")
def accumulate_mean_(t: torch.Tensor, X: torch.Tensor, step: Any) -> torch.Tensor:
    """t = t * step / (step + 1) + X / (step + 1); with step 0, what was there may be infinite or
    NaN.
    """
    old = working(t, t)
    count = (
        working(step.reshape(()), t) if isinstance(step, torch.Tensor) else old.new_full((), step)
    )
    if not is_plain(t):
        return update(t, _mean(old, X, count))
    are_flat = t.is_contiguous() and X.is_contiguous()  # then they are of one kind to the compiler
    _become_mean(*((t.view(-1), X.view(-1)) if are_flat else (t, X)), count)
    return t


@one_pass
def _become_mean(t: torch.Tensor, value: torch.Tensor, step: torch.Tensor) -> None:
    """`_mean` in the old one's place: no copy."""
    t.copy_(mean_of(t, value, step))


@one_pass
def _mean(old: torch.Tensor, value: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """`mean_of` as a tensor of its own."""
    return mean_of(old, value, step)


def mean_of(old: torch.Tensor, value: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """The mean of step + 1 values, of which the last is new."""
    new = value.to(old.dtype)
    kept = torch.where(step == 0, new, old)
    return kept + (new - kept) * (1 / (step + 1))


@kernel("logsumexp_and_pick", device="cuda")
def logsumexp_and_pick(
    logits: torch.Tensor, indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Many rows at a time, in float32 at least."""
    return _losses(logits, indices, None)


@kernel("fused_softcap_logsumexp_and_pick", device="cuda")
def softcap_logsumexp_and_pick(
    logits: torch.Tensor, indices: torch.Tensor, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of bounded logits, which are stored nowhere."""
    return _losses(logits, indices, cap)


def _losses(
    logits: torch.Tensor, indices: torch.Tensor, cap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if not logits.numel():
        return losses(logits, indices, cap)
    is_done, total = _logsumexp.attempt(logits, cap)
    if not is_done:  # its wide copies stay small
        total = torch.cat([_logsumexp.plain(logits[rows], cap) for rows in row_chunks(logits)])
    return total, bounded(pick(logits, indices), cap)


@one_pass_of_each_size
def _logsumexp(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """The logsumexp of each row."""
    return torch.logsumexp(bounded(logits.to(wide_type(logits.dtype)), cap), 1)


@kernel("logsumexp_and_pick_grad", device="cuda")
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
    return _gradients(d_logsumexp, d_picked, logsumexp, logits, indices, None)


@kernel("fused_softcap_logsumexp_and_pick_grad", device="cuda")
def softcap_logsumexp_and_pick_grad(
    d_logsumexp: torch.Tensor,
    d_picked: torch.Tensor,
    logsumexp: torch.Tensor,
    logits: torch.Tensor,
    indices: torch.Tensor,
    cap: float,
) -> torch.Tensor:
    """The same at bounded logits, times the slope of the bound."""
    return _gradients(d_logsumexp, d_picked, logsumexp, logits, indices, cap)


def _gradients(
    d_logsumexp: torch.Tensor,
    d_picked: torch.Tensor,
    logsumexp: torch.Tensor,
    logits: torch.Tensor,
    indices: torch.Tensor,
    cap: float | None,
) -> torch.Tensor:
    result = rows_on_boundaries(logits.shape[0], logits.shape[1], logits)
    shift = torch.where(torch.isneginf(logsumexp), 0, logsumexp)
    classes = indices.to(torch.int64)
    operands = (result, logits, shift, d_logsumexp, d_picked, classes)
    if logits.numel() and not _become_gradient.attempt(*operands, cap)[0]:
        for rows in row_chunks(logits):
            _become_gradient.plain(*(t[rows] for t in operands), cap)
    return result


@one_pass_of_each_size
def _become_gradient(result: torch.Tensor, *operands: Any) -> None:
    """`logits_gradient` where it belongs: no copy."""
    result.copy_(logits_gradient(*operands))


def logits_gradient(
    logits: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    picked: torch.Tensor,
    classes: torch.Tensor,
    cap: float | None,
) -> torch.Tensor:
    """The gradient for some rows; what is none of the classes is picked nowhere."""
    y = bounded(logits.to(shift.dtype), cap)
    columns = torch.arange(logits.shape[1], device=logits.device)
    dy = torch.exp(y - shift[:, None]) * scale[:, None]
    dy = dy + torch.where(columns == classes[:, None], picked[:, None], 0)
    return (dy if cap is None else dy * (1 - (y / cap) ** 2)).to(logits.dtype)
