"""What transformer layers compute beside attention."""

import torch
import torch.nn.functional as F

from popxl_engine.kernels.registry import kernel
from popxl_engine.kernels.rounding import widened


@kernel("swiglu")
def swiglu(t: torch.Tensor) -> torch.Tensor:
    """swish(gate) * values."""
    gate, values = widened(t).chunk(2, 1)
    return (F.silu(gate) * values).to(t.dtype)


@kernel("swiglu_grad")
def swiglu_grad(dy: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Gradients of gate and values, side by side."""
    wide = widened(dy)
    gate, values = widened(t).chunk(2, 1)
    d_gate = torch.ops.aten.silu_backward(wide * values, gate)
    return torch.cat([d_gate, wide * F.silu(gate)], 1).to(t.dtype)


@kernel("rotary")
def rotary(t: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor, inverse: bool) -> torch.Tensor:
    """Pairs turned by their angles."""
    (positions, pairs), by = sin.shape, widened(-sin if inverse else sin)[:, None]
    first, second = widened(t).reshape(-1, positions, t.shape[1] // (2 * pairs), 2, pairs).unbind(3)
    cosine = widened(cos)[:, None]
    turned = torch.stack([first * cosine - second * by, second * cosine + first * by], 3)
    return turned.reshape(t.shape).to(t.dtype)
