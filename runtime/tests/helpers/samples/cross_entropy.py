"""Samples of the add-ons' ops behind the sharded cross entropy."""

import numpy as np
import popxl
import popxl_addons.ops.cross_entropy_sharded_loss  # noqa: F401 - declares the ops
import torch
from popxl.errors import DTypeError, ShapeError

from .sample import Operand, Refusal, Sample

LABELS = np.array([0, 4, 2, 4], np.int32)
OUTSIDE = np.array([-1, 5, 2, -3], np.int32)


def forward(logits, indices):
    indices = torch.as_tensor(indices).long()
    inside = (indices >= 0) & (indices < logits.shape[1])
    picked = logits[torch.arange(len(indices)), torch.where(inside, indices, 0)] * inside
    return torch.log(torch.exp(logits).sum(1)), picked


def gradient(d_logsumexp, d_picked, logsumexp, logits, indices):
    softmax = np.exp(logits - logsumexp[:, None])
    onehot = (np.arange(logits.shape[1]) == np.asarray(indices)[:, None]).astype(logits.dtype)
    return softmax * d_logsumexp[:, None] + onehot * d_picked[:, None]


ROW = Operand((4,), dtype=popxl.float32)
"""What the forward op gives is float32 for 16-bit logits too."""
GRADIENT = (ROW, ROW, ROW, (4, 5))

SAMPLES = [
    Sample("logsumexp_and_pick", operands=((4, 5), LABELS), autograd=forward),
    Sample("logsumexp_and_pick", operands=((4, 5), OUTSIDE), autograd=forward),
    Sample(
        "logsumexp_and_pick",
        operands=(Operand((4, 5), layout="transposed"), LABELS),
        autograd=forward,
    ),
    Sample("logsumexp_and_pick", operands=((4, 5), LABELS), autograd=forward, dtype=popxl.bfloat16),
    Sample("logsumexp_and_pick", operands=((4, 5), LABELS), autograd=forward, dtype=popxl.float16),
    Sample("logsumexp_and_pick_grad", operands=(*GRADIENT, LABELS), oracle=gradient),
    Sample("logsumexp_and_pick_grad", operands=(*GRADIENT, OUTSIDE), oracle=gradient),
]

REFUSALS = [
    Refusal(
        "logsumexp_and_pick",
        operands=((2, 4, 5), LABELS),
        error=ShapeError,
        says="Reshape them first",
    ),
    Refusal(
        "logsumexp_and_pick",
        operands=((3, 5), LABELS),
        error=ShapeError,
        says=r"\[n, classes\] and \[n\]",
    ),
    Refusal(
        "logsumexp_and_pick", operands=((4, 5), (4,)), error=DTypeError, says="integer indices"
    ),
]
