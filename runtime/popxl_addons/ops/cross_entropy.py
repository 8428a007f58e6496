"""Cross entropy of logits that one replica holds."""

from typing import Literal

from popxl import Tensor, ops

REDUCTION_TYPE = Literal["mean", "sum", "none"]


def cross_entropy(
    x: Tensor,
    labels: Tensor,
    ignore_index: int | None = None,
    reduction: REDUCTION_TYPE = "mean",
) -> Tensor:
    """Softmax over the last axis, then negative log-likelihood. Rows labelled ``ignore_index``
    count zero.
    """
    return ops.nll_loss(ops.softmax(x, axis=-1), labels, ignore_index, reduction)


def cross_entropy_with_grad(
    x: Tensor,
    labels: Tensor,
    loss_scaling: float | Tensor = 1,
    ignore_index: int | None = None,
    reduction: REDUCTION_TYPE = "mean",
) -> tuple[Tensor, Tensor]:
    """`cross_entropy`, and its gradient with respect to ``x`` times ``loss_scaling``."""
    probabilities = ops.softmax(x, axis=-1)
    loss, gradient = ops.nll_loss_with_softmax_grad(
        probabilities, labels, loss_scaling, ignore_index, reduction
    )
    return loss, gradient
