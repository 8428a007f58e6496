"""Samples of the negative log-likelihood."""

import numpy as np
import popxl
import torch
from popxl.errors import DTypeError, ShapeError

from .sample import Operand, Refusal, Sample

LABELS = np.array([2, 0, 4], np.int32)
UNSIGNED = np.array([2, 0, 4], np.uint32)
BLOCK = np.array([[1, 0], [2, 2]], np.int32)
PROBS = Operand((3, 5), low=0.05, high=1.0)
LOGITS = np.array(
    [[0.3, -1.0, 2.0, 0.1, 0.0], [1.0, 0.5, -0.5, 0.2, 0.9], [-0.3, 0.2, 0.4, 1.5, -2.0]]
)
SOFTMAX = np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)


def nll(probs, labels, ignore_index=None, reduction="mean", log_prob=False):
    index = torch.as_tensor(labels).long()
    counts = (
        torch.ones_like(index, dtype=torch.bool) if ignore_index is None else index != ignore_index
    )
    picked = probs.gather(-1, torch.where(counts, index, 0)[..., None])[..., 0]
    losses = torch.where(counts, -picked if log_prob else -torch.log(picked), 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / max(1, int(counts.sum()))


def nll_grad(dy, probs, labels, ignore_index, reduction, log_prob):
    leaf = torch.from_numpy(probs).requires_grad_()
    loss = nll(leaf, torch.as_tensor(labels), ignore_index, reduction, log_prob)
    return torch.autograd.grad(loss, leaf, torch.from_numpy(np.asarray(dy)))[0]


def with_softmax(probs, labels, loss_grad=1.0, ignore_index=None, reduction="mean"):
    """The gradient by torch through log-softmax of the logits log(probs)."""
    logits = torch.log(torch.from_numpy(probs)).requires_grad_()
    loss = nll(
        torch.log_softmax(logits, -1), torch.as_tensor(labels), ignore_index, reduction, True
    )
    grad = torch.autograd.grad(
        loss, logits, torch.as_tensor(loss_grad, dtype=torch.float64).expand(loss.shape).clone()
    )[0]
    return loss.detach(), grad


SAMPLES = [
    *(
        Sample("nll_loss", operands=(PROBS, LABELS), attrs={"reduction": r}, autograd=nll)
        for r in ("mean", "sum", "none")
    ),
    *(
        Sample(
            "nll_loss",
            operands=(PROBS, LABELS),
            attrs={"reduction": r, "ignore_index": 0},
            autograd=nll,
        )
        for r in ("mean", "sum", "none")
    ),
    Sample(
        "nll_loss",
        operands=(PROBS, np.array([-1, 3, -1], np.int32)),
        attrs={"ignore_index": -1},
        autograd=nll,
    ),
    Sample(
        "nll_loss",
        operands=(PROBS, np.array([-1, -1, -1], np.int32)),
        attrs={"ignore_index": -1},
        autograd=nll,
    ),
    Sample("nll_loss", operands=(PROBS, UNSIGNED), autograd=nll),
    Sample("nll_loss", operands=((3, 5), LABELS), attrs={"log_prob": True}, autograd=nll),
    Sample("nll_loss", operands=(Operand((2, 2, 3), low=0.05, high=1.0), BLOCK), autograd=nll),
    Sample(
        "nll_loss",
        operands=(Operand((3, 5), low=0.05, high=1.0, layout="transposed"), LABELS),
        autograd=nll,
    ),
    # Probabilities below the floor: the loss stays finite. The gradient there is -1 / floor, not
    # the floored loss's zero.
    Sample(
        "nll_loss",
        operands=(np.array([[0.0, 1.0]]), np.array([0], np.int32)),
        oracle=lambda p, labels: -np.log(1e-7),
        grads=None,
        in_16_bits=False,
    ),
    Sample(
        "nll_loss",
        operands=(np.array([[0.0, 1.0]]), np.array([0], np.int32)),
        oracle=lambda p, labels: -np.log(6.1e-5),
        grads=None,
        dtype=popxl.float16,
    ),
    *(
        Sample(
            "nll_loss_grad",
            operands=((), PROBS, LABELS),
            attrs={"ignore_index": i, "reduction": r, "log_prob": p},
            oracle=nll_grad,
        )
        for i, r, p in ((None, "mean", False), (0, "mean", False), (0, "sum", True))
    ),
    Sample(
        "nll_loss_grad",
        operands=((3,), PROBS, LABELS),
        attrs={"ignore_index": 2, "reduction": "none", "log_prob": False},
        oracle=nll_grad,
    ),
    Sample(
        "nll_loss_grad",
        operands=((), np.array([[0.0, 1.0]]), np.array([0], np.int32)),
        attrs={"ignore_index": None, "reduction": "sum", "log_prob": False},
        oracle=lambda dy, *rest, **attrs: np.array([[-dy / 1e-7, 0]]),
        in_16_bits=False,
    ),
    *(
        Sample(
            "nll_loss_with_softmax_grad",
            operands=(SOFTMAX, LABELS),
            attrs={"reduction": r, "ignore_index": i},
            oracle=with_softmax,
        )
        for r in ("mean", "sum", "none")
        for i in (None, 0)
    ),
    Sample(
        "nll_loss_with_softmax_grad",
        operands=(SOFTMAX, LABELS),
        attrs={"loss_grad": 2.5},
        oracle=with_softmax,
    ),
    Sample("nll_loss_with_softmax_grad", operands=(SOFTMAX, LABELS, ()), oracle=with_softmax),
    Sample(
        "nll_loss_with_softmax_grad",
        operands=(SOFTMAX, UNSIGNED, (3,)),
        attrs={"reduction": "none"},
        oracle=with_softmax,
    ),
]

REFUSALS = [
    *(
        refusal
        for name in ("nll_loss", "nll_loss_with_softmax_grad")
        for refusal in (
            Refusal(
                name, operands=((3, 5), LABELS[:2]), error=ShapeError, says="expected 3 labels"
            ),
            Refusal(
                name,
                operands=((3, 5), (3,)),
                error=DTypeError,
                says="got labels float32.*expected integers",
            ),
            Refusal(
                name,
                operands=(LABELS, LABELS[:1]),
                error=DTypeError,
                says="got probs int32.*expected floating point",
            ),
            Refusal(
                name,
                operands=((3, 5), LABELS),
                attrs={"reduction": "median"},
                error=ValueError,
                says="'mean', 'sum' or 'none'",
            ),
        )
    ),
    Refusal(
        "nll_loss_with_softmax_grad",
        operands=((3, 5), LABELS, (2,)),
        error=ShapeError,
        says="got loss_grad",
    ),
]
