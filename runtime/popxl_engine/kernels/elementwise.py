"""Elementwise functions and activations."""

import math
from collections.abc import Callable

import torch
from torch.nn import functional as F

from popxl_engine.kernels.registry import kernel

Unary = Callable[[torch.Tensor], torch.Tensor]
Grad = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
aten = torch.ops.aten


def unary(name: str, fn: Unary) -> None:
    """Register an elementwise function of one tensor."""

    def run(t: torch.Tensor) -> torch.Tensor:
        return fn(t)

    kernel(name)(run)


def grad(name: str, fn: Grad) -> None:
    """Register the gradient of an elementwise function."""

    def run(dy: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return fn(dy, at)

    kernel(name)(run)


GELU = math.sqrt(8 / math.pi)
"""Twice the factor of the tanh form's argument: (1 + tanh(u)) / 2 is sigmoid(2u)."""
PIECE = 1 << 20
"""Elements of a large tensor that `gelu` has float32 copies of at a time."""


def gelu(t: torch.Tensor) -> torch.Tensor:
    """t * sigmoid(2u) with u = sqrt(2 / pi) * (t + 0.044715 t**3): the tanh form, whose sigmoid is
    quicker on CPUs.
    """
    if t.is_cuda or t.dtype == torch.float64:
        return F.gelu(t, approximate="tanh")
    result = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    for piece, source in zip(result.view(-1).split(PIECE), t.reshape(-1).split(PIECE)):
        x = source.to(torch.float32)
        twice_u = torch.mul(x, x).mul_(0.044715 * GELU).add_(GELU).mul_(x)
        piece.copy_(twice_u.sigmoid_().mul_(x))
    return result


for _name in ("exp", "log", "log2", "sqrt", "sin", "cos", "tanh", "ceil", "floor", "relu"):
    unary(_name, getattr(torch, _name))
unary("relu2", lambda t: torch.relu(t).square_())
unary("gelu", gelu)
unary("geluerf", F.gelu)
unary("swish", F.silu)

grad("relu_grad", lambda dy, at: aten.threshold_backward(dy, at, 0))
grad("relu2_grad", lambda dy, at: torch.relu(at).mul_(2).mul_(dy))
grad("tanh_grad", aten.tanh_backward)
grad("gelu_grad", lambda dy, at: aten.gelu_backward(dy, at, approximate="tanh"))
grad("geluerf_grad", lambda dy, at: aten.gelu_backward(dy, at))
grad("swish_grad", aten.silu_backward)
