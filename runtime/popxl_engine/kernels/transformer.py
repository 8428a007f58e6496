"""What transformer layers compute beside attention."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from popxl_engine.kernels.registry import kernel
from popxl_engine.kernels.rounding import as_float32


@kernel("swiglu")
def swiglu(t: torch.Tensor) -> torch.Tensor:
    """swish(gate) * values."""
    gate, values = as_float32(t).chunk(2, 1)
    return (F.silu(gate) * values).to(t.dtype)


@kernel("swiglu_grad")
def swiglu_grad(dy: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Gradients of gate and values, side by side."""
    wide = as_float32(dy)
    gate, values = as_float32(t).chunk(2, 1)
    d_gate = torch.ops.aten.silu_backward(wide * values, gate)
    return torch.cat([d_gate, wide * F.silu(gate)], 1).to(t.dtype)


PIECE = 1 << 16
"""Elements at a time, which stay in the cache from one step to the next."""


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    size = tensors[0].numel() or 1 if tensors[0].is_cuda else PIECE
    return zip(*(t.reshape(-1).split(size) for t in tensors))


@kernel("softcap")
def softcap(t: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(t / cap)."""
    result = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    for piece, source in _pieces(result, t):
        piece.copy_(as_float32(source).div(cap).tanh_().mul_(cap))
    return result


@kernel("softcap_grad")
def softcap_grad(dy: torch.Tensor, y: torch.Tensor, cap: float) -> torch.Tensor:
    """dy * (1 - (y / cap)**2)."""
    result = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    for piece, slope, value in _pieces(result, dy, y):
        share = as_float32(value).div(cap)
        piece.copy_(share.mul_(share).neg_().add_(1).mul_(as_float32(slope)))
    return result


@kernel("rotary")
def rotary(t: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor, inverse: bool) -> torch.Tensor:
    """Pairs rotated by their angles."""
    (positions, pairs), by = sin.shape, as_float32(-sin if inverse else sin)[:, None]
    first, second = (
        as_float32(t).reshape(-1, positions, t.shape[1] // (2 * pairs), 2, pairs).unbind(3)
    )
    cosine = as_float32(cos)[:, None]
    rotated = torch.stack([first * cosine - second * by, second * cosine + first * by], 3)
    return rotated.reshape(t.shape).to(t.dtype)


@kernel("short_convolution")
def short_convolution(
    t: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, transposed: bool
) -> torch.Tensor:
    """A pass over the rows for each distance."""
    x, factors = as_float32(t), as_float32(weight)
    result = x.clone()
    for i, own in enumerate(factors[: max(0, len(x) - 1)], start=1):
        source, target = (x[i:], result[:-i]) if transposed else (x[:-i], result[i:])
        target += (source * own).where(_has_before(positions, i), 0.0)
    return result.to(t.dtype)


@kernel("short_convolution_weight_grad")
def short_convolution_weight_grad(
    dy: torch.Tensor, t: torch.Tensor, positions: torch.Tensor, size: int
) -> torch.Tensor:
    """A sum over the rows for each distance."""
    slopes, x = as_float32(dy), as_float32(t)
    result = x.new_zeros(size, t.shape[1])
    for i in range(1, min(size, len(x) - 1) + 1):
        products = slopes[i:] * x[:-i]
        result[i - 1] = products.where(_has_before(positions, i), 0.0).sum(0)
    return result.to(t.dtype)


def _has_before(positions: torch.Tensor, distance: int) -> torch.Tensor:
    """Whether each row from that distance on has one of its sequence so far before, [n, 1]."""
    return (positions[distance:] >= distance)[:, None]
