"""Elementwise arithmetic."""

from collections.abc import Callable
from typing import Any

import torch

from popxl_engine.kernels.dtypes import LIMITED
from popxl_engine.kernels.registry import kernel
from popxl_engine.kernels.rounding import TORCH_HALF_DTYPES, Updates, as_float32, update

Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Unary = Callable[[torch.Tensor], torch.Tensor]
Scalar = float | torch.Tensor


def binary(fn: Binary) -> Binary:
    """A kernel for every element type: unsigned integers without torch arithmetic go through
    int64.
    """

    def run(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
        if lhs.dtype in LIMITED:
            return fn(lhs.to(torch.int64), rhs.to(torch.int64)).to(lhs.dtype)
        return fn(lhs, rhs)

    return run


def unary(fn: Unary) -> Unary:
    """As `binary`, for one tensor."""

    def run(t: torch.Tensor) -> torch.Tensor:
        return fn(t.to(torch.int64)).to(t.dtype) if t.dtype in LIMITED else fn(t)

    return run


def divide(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """Quotient, truncated for integers."""
    if lhs.is_floating_point() or lhs.is_complex():
        return torch.div(lhs, rhs)
    divisors, is_minus_one = without_minus_one(rhs)
    quotient = torch.div(lhs, divisors, rounding_mode="trunc")
    return quotient if is_minus_one is None else torch.where(is_minus_one, -quotient, quotient)


def remainder(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """C's remainder."""
    return torch.fmod(lhs, rhs if rhs.is_floating_point() else without_minus_one(rhs)[0])


def without_minus_one(divisors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Integers with 1 in place of -1, and where that is; processors trap when they divide the
    lowest integer by -1.
    """
    if not divisors.dtype.is_signed:
        return divisors, None
    is_minus_one = divisors == -1
    return divisors.masked_fill(is_minus_one, 1), is_minus_one


kernel("add")(binary(torch.add))
kernel("sub")(binary(torch.sub))
kernel("mul")(binary(torch.mul))
kernel("div")(binary(divide))
kernel("fmod")(binary(remainder))
kernel("negate")(unary(torch.neg))
kernel("abs")(unary(torch.abs))
kernel("sign")(unary(torch.sign))


@kernel("add_")
def add_(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """lhs += rhs."""
    if lhs.dtype in LIMITED:
        return lhs.copy_((lhs.to(torch.int64) + rhs.to(torch.int64)).to(lhs.dtype))
    if lhs.dtype in TORCH_HALF_DTYPES and Updates.next_seed is not None:
        return update(lhs, as_float32(lhs) + rhs)
    return lhs.add_(rhs)


@kernel("pow")
def pow(t: torch.Tensor, e: Scalar) -> torch.Tensor:
    """t**e."""
    if t.dtype in LIMITED and isinstance(e, torch.Tensor):
        return torch.pow(t.to(torch.int64), e.to(torch.int64)).to(t.dtype)
    return torch.pow(t, e)


@kernel("pow_grad")
def pow_grad(
    dy: torch.Tensor, t: torch.Tensor, e: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Gradients for base and exponent; the exponent's is 0 where the base is 0."""
    dt = dy * torch.where(e == 0, torch.zeros_like(y), e * torch.pow(t, e - 1))
    de = dy * torch.where(t == 0, torch.zeros_like(y), y * torch.log(t))
    return dt, de


@kernel("maximum")
def maximum(*ts: torch.Tensor) -> torch.Tensor:
    """Elementwise maximum of all."""
    limited = ts[0].dtype in LIMITED
    result = ts[0].to(torch.int64) if limited else ts[0]
    for t in ts[1:]:
        result = torch.maximum(result, t.to(result.dtype))
    return result.to(ts[0].dtype) if limited else result.clone() if len(ts) == 1 else result


@kernel("maximum_grad")
def maximum_grad(
    dy: torch.Tensor, y: torch.Tensor, ts: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """dy to the operands that equal the maximum, in equal shares."""
    largest = [t == y for t in ts]
    share = dy / torch.stack([m.expand(y.shape) for m in largest]).sum(0)
    return tuple(torch.where(m, share, torch.zeros_like(share)) for m in largest)


@kernel("scale")
def scale(t: torch.Tensor, factor: float) -> torch.Tensor:
    """t * factor."""
    return torch.mul(t, factor)


@kernel("clip")
def clip(t: torch.Tensor, min: float, max: float) -> torch.Tensor:
    """t limited to [min, max]; infinite limits are none."""
    low, high = (None if abs(v) == float("inf") else v for v in (min, max))
    if low is None and high is None:
        return t.clone()
    wide = t.to(torch.int64) if t.dtype in LIMITED else t
    return torch.clamp(wide, low, high).to(t.dtype)


@kernel("clip_grad")
def clip_grad(dy: torch.Tensor, t: torch.Tensor, min: float, max: float) -> torch.Tensor:
    """dy where t is inside."""
    return torch.where((t >= min) & (t <= max), dy, torch.zeros_like(dy))


@kernel("increment_mod")
def increment_mod(t: torch.Tensor, increment: float, modulus: float) -> torch.Tensor:
    """(t + increment) % modulus."""
    if t.is_floating_point():
        return torch.fmod(as_float32(t) + increment, modulus).to(t.dtype)
    return torch.fmod(t.to(torch.int64) + int(increment), int(modulus)).to(t.dtype)


def _factor(value: Scalar, like: torch.Tensor) -> Any:
    """A factor ready to be multiplied with ``like``: a number, or a tensor without axes of like's
    dtype.
    """
    return value.reshape(()).to(like.dtype) if isinstance(value, torch.Tensor) else value


@kernel("scaled_add")
def scaled_add(X: torch.Tensor, Y: torch.Tensor, a: Scalar, b: Scalar) -> torch.Tensor:
    """a * X + b * Y."""
    return weighted_sum(X, Y, a, b).to(X.dtype)


def weighted_sum(X: torch.Tensor, Y: torch.Tensor, a: Scalar, b: Scalar) -> torch.Tensor:
    """a * X + b * Y in X's type, 16-bit types in float32, integers in float64."""
    if not X.is_floating_point():
        X, Y = X.to(torch.float64), Y.to(torch.float64)
        return (X * _factor(a, X) + Y * _factor(b, Y)).to(torch.int64)
    X = as_float32(X)
    Y = Y.to(X.dtype)
    left = X if _is_one(a) else X * _factor(a, X)
    return (
        left.add(Y, alpha=b)
        if not isinstance(b, torch.Tensor)
        else torch.addcmul(left, Y, _factor(b, Y))
    )


def _is_one(value: Scalar) -> bool:
    return not isinstance(value, torch.Tensor) and value == 1.0


@kernel("scaled_add_")
def scaled_add_(X: torch.Tensor, Y: torch.Tensor, a: Scalar, b: Scalar) -> torch.Tensor:
    """X = a * X + b * Y."""
    if X.dtype in TORCH_HALF_DTYPES or not X.is_floating_point():
        return update(X, weighted_sum(X, Y, a, b))
    # Y may be X itself: no step may write X early
    Y, left = Y.to(X.dtype), X if _is_one(a) else X * _factor(a, X)
    if isinstance(b, torch.Tensor):
        return torch.addcmul(left, Y, _factor(b, Y), out=X)
    return torch.add(left, Y, alpha=b, out=X)
