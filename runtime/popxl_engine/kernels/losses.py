"""Negative log-likelihood of labels."""

import torch

from popxl_engine.kernels.indexing import inside_only
from popxl_engine.kernels.registry import kernel
from popxl_engine.kernels.rounding import as_float32


def floor_of(dtype: torch.dtype) -> float:
    """Smallest probability that counts: float16's smallest normal number, 1e-7 otherwise."""
    return 6.1e-5 if dtype == torch.float16 else 1e-7


def rows(
    labels: torch.Tensor, probs: torch.Tensor, ignore_index: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(labels of probs' rows as indices with an axis at the end, which count); those that do not
    point at class 0.
    """
    index = labels.to(torch.int64).reshape(probs.shape[:-1])
    counts = (
        torch.ones_like(index, dtype=torch.bool) if ignore_index is None else index != ignore_index
    )
    return torch.where(counts, index, torch.zeros_like(index)).unsqueeze(-1), counts


def reduced(losses: torch.Tensor, counts: torch.Tensor, reduction: str) -> torch.Tensor:
    """Losses of the rows that count, as the reduction wants them."""
    losses = torch.where(counts, losses, torch.zeros_like(losses))
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum().clamp(min=1)


def row_weights(
    dy: float | torch.Tensor, counts: torch.Tensor, like: torch.Tensor, reduction: str
) -> torch.Tensor:
    """The loss's gradient for each row: 0 where it does not count, divided by their number for a
    mean.
    """
    if isinstance(dy, torch.Tensor):
        dy = dy.reshape(() if dy.numel() == 1 else counts.shape)
    weights = counts.to(as_float32(like).dtype) * dy
    return weights / counts.sum().clamp(min=1) if reduction == "mean" else weights


@kernel("nll_loss")
@inside_only
def nll_loss(
    probs: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int | None,
    reduction: str,
    log_prob: bool,
) -> torch.Tensor:
    """-log(p[label])."""
    index, counts = rows(labels, probs, ignore_index)
    p = as_float32(probs.gather(-1, index).squeeze(-1))
    losses = -p if log_prob else -torch.log(p.clamp(min=floor_of(probs.dtype)))
    loss = reduced(losses, counts, reduction).to(probs.dtype)
    return loss.reshape(labels.shape) if reduction == "none" else loss


@kernel("nll_loss_grad")
@inside_only
def nll_loss_grad(
    dy: torch.Tensor,
    probs: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int | None,
    reduction: str,
    log_prob: bool,
) -> torch.Tensor:
    """-1 / p at the labels."""
    index, counts = rows(labels, probs, ignore_index)
    at_labels = -row_weights(as_float32(dy), counts, probs, reduction).unsqueeze(-1)
    if not log_prob:
        at_labels = at_labels / as_float32(probs.gather(-1, index)).clamp(min=floor_of(probs.dtype))
    return torch.zeros_like(probs).scatter_(-1, index, at_labels.to(probs.dtype))


@kernel("nll_loss_with_softmax_grad")
def nll_loss_with_softmax_grad(
    probs: torch.Tensor,
    labels: torch.Tensor,
    loss_grad: float | torch.Tensor,
    ignore_index: int | None,
    reduction: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and (p - onehot) * loss_grad."""
    index, counts = rows(labels, probs, ignore_index)
    loss = nll_loss(probs, labels, ignore_index, reduction, False)
    weights = row_weights(loss_grad, counts, probs, reduction).unsqueeze(-1)
    grad = as_float32(probs) * weights
    return loss, grad.scatter_add_(-1, index, -weights).to(probs.dtype)
