"""Elementwise functions and activations."""

from typing import Callable

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


for _name in ("exp", "log", "log2", "sqrt", "sin", "cos", "tanh", "ceil", "floor", "relu"):
    unary(_name, getattr(torch, _name))
unary("gelu", lambda t: F.gelu(t, approximate="tanh"))
unary("geluerf", F.gelu)
unary("swish", F.silu)

grad("relu_grad", lambda dy, at: aten.threshold_backward(dy, at, 0))
grad("tanh_grad", aten.tanh_backward)
grad("gelu_grad", lambda dy, at: aten.gelu_backward(dy, at, approximate="tanh"))
grad("geluerf_grad", lambda dy, at: aten.gelu_backward(dy, at))
grad("swish_grad", aten.silu_backward)
