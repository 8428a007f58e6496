"""What transformer layers compute beside attention."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from popxl_engine.kernels.registry import kernel
from popxl_engine.kernels.rounding import as_float32

aten = torch.ops.aten


def _gated(name: str, function: Callable[..., torch.Tensor], backward: Callable[..., Any]) -> None:
    """A function of a gate times values, and its gradient."""

    @kernel(name)
    def forward(t: torch.Tensor) -> torch.Tensor:
        gate, values = as_float32(t).chunk(2, 1)
        return (function(gate) * values).to(t.dtype)

    @kernel(f"{name}_grad")
    def gradient(dy: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        wide = as_float32(dy)
        gate, values = as_float32(t).chunk(2, 1)
        return torch.cat([backward(wide * values, gate), wide * function(gate)], 1).to(t.dtype)


_gated("swiglu", F.silu, aten.silu_backward)
_gated(
    "geglu",
    lambda gate: F.gelu(gate, approximate="tanh"),
    lambda slope, gate: aten.gelu_backward(slope, gate, approximate="tanh"),
)


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
def rotary(
    t: torch.Tensor,
    sin: torch.Tensor,
    cos: torch.Tensor,
    inverse: bool = False,
    size: int | None = None,
) -> torch.Tensor:
    """Pairs rotated by their angles."""
    (positions, pairs), by = sin.shape, as_float32(-sin if inverse else sin)[:, None]
    width, cosine = size or 2 * pairs, as_float32(cos)[:, None]
    first, second, rest = (
        as_float32(t)
        .reshape(-1, positions, t.shape[1] // width, width)
        .split([pairs, pairs, width - 2 * pairs], 3)
    )
    rotated = [first * cosine - second * by, second * cosine + first * by, rest]
    return torch.cat(rotated, 3).reshape(t.shape).to(t.dtype)


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
