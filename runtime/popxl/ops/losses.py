"""Negative log-likelihood of labels."""

import math
from typing import Any, Literal

from popxl.errors import ShapeError
from popxl.opdef import Cost, op
from popxl.ops.checks import check_floating, check_indices
from popxl.tensor import Tensor, TensorSpec

REDUCTION_TYPE = Literal["mean", "sum", "none"]


def _loss_spec(name: str, probs: Tensor, labels: Tensor, reduction: str) -> TensorSpec:
    check_floating(name, probs=probs)
    check_indices(name, "labels", labels)
    if probs.rank < 1 or labels.nelms != math.prod(probs.shape[:-1]):
        raise ShapeError(
            f"{name}: got probs {probs.spec} and labels {labels.spec}; expected "
            f"{math.prod(probs.shape[:-1])} labels, one for each row of classes, in any shape. "
            "Reshape one of them."
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{name}: got reduction {reduction!r}; expected 'mean', 'sum' or 'none'.")
    return TensorSpec(labels.shape if reduction == "none" else (), probs.dtype)


@op
def nll_loss(
    probs: Tensor,
    labels: Tensor,
    ignore_index: int | None = None,
    reduction: REDUCTION_TYPE = "mean",
    log_prob: bool = False,
) -> TensorSpec:
    """-log(p[label]), with probabilities floored at 1e-7 (float16: 6.1e-5): loss and gradient stay
    finite.

    Shapes: probs [..., classes], floating point; labels of any shape with one element for each row
    of classes, in order, integers in [0, classes) -> [] or, for "none", labels' shape.
    Args:
        ignore_index: label of rows that count neither for the loss nor for the mean.
        reduction: "mean" over the rows that count (0 if none does), "sum", or "none".
        log_prob: whether probs holds log-probabilities; those are not floored.
    Raises:
        ShapeError: for another number of labels.
        DTypeError: from sessions, if probs is not floating point or labels are not integers.
        ValueError: for another reduction.
    """
    return _loss_spec("nll_loss", probs, labels, reduction)


@nll_loss.vjp
def nll_loss_vjp(
    dy: Tensor,
    y: Tensor,
    probs: Tensor,
    labels: Tensor,
    ignore_index: int | None,
    reduction: str,
    log_prob: bool,
) -> tuple[Tensor | None, None]:
    """-1 / p at the labels; labels have no gradient."""
    return nll_loss_grad(dy, probs, labels, ignore_index, reduction, log_prob), None


@op(differentiable=False)
def nll_loss_grad(
    dy: Tensor,
    probs: Tensor,
    labels: Tensor,
    ignore_index: int | None,
    reduction: str,
    log_prob: bool,
) -> TensorSpec:
    """Gradient of `nll_loss` for probs: -1 / max(p, floor) at the labels, scaled as the reduction;
    0 elsewhere.
    """
    return probs.spec


@op(differentiable=False)
def nll_loss_with_softmax_grad(
    probs: Tensor,
    labels: Tensor,
    loss_grad: float | Tensor = 1,
    ignore_index: int | None = None,
    reduction: REDUCTION_TYPE = "mean",
) -> tuple[TensorSpec, ...]:
    """The loss, and its gradient for the logits of which probs is the softmax: (p - onehot(label))
    * loss_grad.

    Shapes: probs and labels as for `nll_loss` -> (loss as of `nll_loss`, gradient of probs' shape).
    Args:
        loss_grad: gradient of the loss: a number, a tensor of one element, or for "none" a tensor
            of labels' shape.
        ignore_index: label of rows whose loss and gradient are zero, and that do not count for the
            mean.
        reduction: "mean" over the rows that count, "sum", or "none"; the gradient is scaled
            likewise.
    Raises:
        ShapeError, DTypeError, ValueError: as `nll_loss`, and for a loss_grad of another shape.
    """
    loss = _loss_spec("nll_loss_with_softmax_grad", probs, labels, reduction)
    if isinstance(loss_grad, Tensor) and loss_grad.nelms != 1 and loss_grad.shape != loss.shape:
        raise ShapeError(
            f"nll_loss_with_softmax_grad: got loss_grad {loss_grad.spec}; expected a number, one "
            f"element, or the loss's shape {list(loss.shape)}."
        )
    return loss, probs.spec


@nll_loss.cost
def nll_loss_cost(y: Tensor, probs: Tensor, labels: Tensor, *options: Any) -> Cost:
    """A logarithm per row; of probs only the labels' entries are read."""
    rows = labels.nelms
    return Cost(
        flops=9 * rows,
        bytes=rows * (probs.dtype.itemsize + labels.dtype.itemsize) + y.nelms * y.dtype.itemsize,
    )


@nll_loss_grad.cost
def nll_loss_grad_cost(y: Tensor, dy: Tensor, probs: Tensor, labels: Tensor, *options: Any) -> Cost:
    """A quotient per row; the result is written whole."""
    return Cost(
        flops=2 * labels.nelms,
        bytes=y.nelms * y.dtype.itemsize + labels.nelms * labels.dtype.itemsize,
    )


@nll_loss_with_softmax_grad.cost
def nll_loss_with_softmax_grad_cost(y: Any, probs: Tensor, labels: Tensor, *options: Any) -> Cost:
    """A logarithm per row and a product per probability."""
    return Cost(flops=9 * labels.nelms + 2 * probs.nelms)
