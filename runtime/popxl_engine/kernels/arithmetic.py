"""Elementwise arithmetic."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from popxl.ops.arithmetic import division_by_zero, integer_bounds

from popxl_engine.kernels.dtypes import LIMITED, as_signed, computable, from_ordered, ordered
from popxl_engine.kernels.registry import kernel
from popxl_engine.kernels.rounding import TORCH_HALF_DTYPES, Updates, as_float32, update

Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Unary = Callable[[torch.Tensor], torch.Tensor]
Scalar = float | torch.Tensor


def binary(fn: Binary, takes_uint64: bool = False) -> Binary:
    """A kernel for every element type: unsigned integers without torch arithmetic go through
    int64, uint64 not where its bits would not be right.
    """

    def run(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
        if lhs.dtype in LIMITED and not (takes_uint64 and lhs.dtype == torch.uint64):
            return fn(lhs.to(torch.int64), rhs.to(torch.int64)).to(lhs.dtype)
        return fn(lhs, rhs)

    return run


def unary(fn: Unary) -> Unary:
    """The same as `binary`, for one tensor."""

    def run(t: torch.Tensor) -> torch.Tensor:
        return fn(t.to(torch.int64)).to(t.dtype) if t.dtype in LIMITED else fn(t)

    return run


def refusing_zero(fn: Binary) -> Binary:
    """A division with an error in words where processors trap: of integers, by zero."""

    def run(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
        try:
            return fn(lhs, rhs)
        except RuntimeError as error:
            if "ZeroDivisionError" in str(error):
                raise division_by_zero() from None
            raise

    return run


@refusing_zero
def divide(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """Quotient, truncated for integers."""
    if lhs.is_floating_point() or lhs.is_complex():
        return torch.div(lhs, rhs)
    if lhs.dtype == torch.uint64:
        return unsigned_quotient(lhs, rhs)
    divisors, is_minus_one = without_minus_one(rhs)
    quotient = torch.div(lhs, divisors, rounding_mode="trunc")
    return quotient if is_minus_one is None else torch.where(is_minus_one, -quotient, quotient)


@refusing_zero
def remainder(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """C's remainder."""
    if lhs.dtype == torch.uint64:
        quotient = unsigned_quotient(lhs, rhs).view(torch.int64)
        return (lhs.view(torch.int64) - quotient * rhs.view(torch.int64)).view(torch.uint64)
    return torch.fmod(lhs, rhs if rhs.is_floating_point() else without_minus_one(rhs)[0])


def unsigned_quotient(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """The quotient of uint64, by arithmetic of int64.

    Source: Warren, "Hacker's Delight", 2nd ed. 2012, section 9-3: half the dividend's quotient,
    doubled, is too small by one at most.
    """
    n, d = lhs.view(torch.int64), rhs.view(torch.int64)
    half = (n >> 1) & torch.iinfo(torch.int64).max
    quotient = torch.div(half, torch.where(d < 0, torch.ones_like(d), d), rounding_mode="trunc") * 2
    quotient = torch.where(d < 0, torch.zeros_like(quotient), quotient)
    rest = (n - quotient * d).view(torch.uint64)
    return (quotient + (ordered(rest) >= ordered(rhs))).view(torch.uint64)


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
kernel("div")(binary(divide, takes_uint64=True))
kernel("fmod")(binary(remainder, takes_uint64=True))
kernel("negate")(unary(torch.neg))
kernel("abs")(lambda t: torch.abs(t) if t.dtype not in LIMITED else t.clone())
kernel("sign")(
    lambda t: torch.sign(t) if t.dtype not in LIMITED else (t.to(torch.int64) != 0).to(t.dtype)
)


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
    own = dy.dtype
    dy, t, e, y = map(computable, (dy, t, e, y))
    dt = dy * torch.where(e == 0, torch.zeros_like(y), e * torch.pow(t, e - 1))
    de = dy * torch.where(t == 0, torch.zeros_like(y), y * torch.log(t))
    return dt.to(own), de.to(own)


@kernel("maximum")
def maximum(*ts: torch.Tensor) -> torch.Tensor:
    """Elementwise maximum of all."""
    if len(ts) == 1:
        return ts[0].clone()
    return from_ordered(functools.reduce(torch.maximum, map(ordered, ts)), ts[0].dtype)


def shared(dy: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """dy in so many equal shares, truncated for integers."""
    if dy.is_floating_point():
        return dy / among
    return torch.div(dy.to(torch.int64), among, rounding_mode="trunc").to(dy.dtype)


def only_where(chosen: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """t, and zeros elsewhere."""
    return torch.where(chosen, as_signed(t), 0).view(t.dtype)


@kernel("maximum_grad")
def maximum_grad(
    dy: torch.Tensor, y: torch.Tensor, ts: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """dy to the operands that equal the maximum, in equal shares."""
    largest = [as_signed(t) == as_signed(y) for t in ts]
    share = shared(dy, torch.stack([m.expand(y.shape) for m in largest]).sum(0))
    return tuple(only_where(m, share) for m in largest)


@kernel("scale")
def scale(t: torch.Tensor, factor: float) -> torch.Tensor:
    """t * factor."""
    return torch.mul(t, factor)


def rounded_bound(value: float, dtype: torch.dtype) -> float:
    """A bound as torch takes it: infinite where the type rounds it to that."""
    info = torch.finfo(dtype)
    half_step = math.ldexp(info.eps, math.frexp(info.max)[1] - 2)
    if abs(value) >= info.max + half_step:
        return math.copysign(math.inf, value)
    return min(max(value, -info.max), info.max)


@kernel("clip")
def clip(t: torch.Tensor, min: float, max: float) -> torch.Tensor:
    """t limited to [min, max], bounds rounded to its type."""
    if not t.is_floating_point():
        info = torch.iinfo(t.dtype)
        bounds = integer_bounds(min, max, info.min, info.max)
        if t.dtype == torch.uint64:
            bounds = bounds[0] - 2**63, bounds[1] - 2**63
        return from_ordered(torch.clamp(ordered(t), *bounds), t.dtype)
    return torch.clamp(t, rounded_bound(min, t.dtype), rounded_bound(max, t.dtype))


@kernel("clip_grad")
def clip_grad(dy: torch.Tensor, t: torch.Tensor, min: float, max: float) -> torch.Tensor:
    """dy where t is inside."""
    if not t.is_floating_point():  # a bound may be outside of the type
        return only_where(as_signed(clip(t, min, max)) == as_signed(t), dy)
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
    """a * X + b * Y in X's type, 16-bit types in float32, integers as `sum_of_integers`."""
    if not X.is_floating_point():
        return sum_of_integers(X, Y, a, b)
    X = as_float32(X)
    Y = Y.to(X.dtype)
    left = X if _is_one(a) else X * _factor(a, X)
    return (
        left.add(Y, alpha=b)
        if not isinstance(b, torch.Tensor)
        else torch.addcmul(left, Y, _factor(b, Y))
    )


def sum_of_integers(X: torch.Tensor, Y: torch.Tensor, a: Scalar, b: Scalar) -> torch.Tensor:
    """a * X + b * Y in int64, as X is of integers: as it is where all are whole, else made in
    float64, which holds whole numbers up to 2**53.
    """
    if _is_whole(a) and _is_whole(b) and not Y.is_floating_point():
        return X.to(torch.int64) * int(a) + Y.to(torch.int64) * int(b)
    X, Y = X.to(torch.float64), Y.to(torch.float64)
    return (X * _factor(a, X) + Y * _factor(b, Y)).to(torch.int64)


def _is_whole(value: Scalar) -> bool:
    """Whether a factor is a number that int64 holds."""
    return not isinstance(value, torch.Tensor) and float(value).is_integer() and abs(value) < 2**63


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
