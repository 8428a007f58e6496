"""Elementwise arithmetic: ops of two tensors that broadcast against each other, and ops of a tensor
and numbers.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from popxl.errors import ShapeError
from popxl.opdef import Cost, inplace, op
from popxl.ops.broadcasting import sum_to
from popxl.ops.casting import cast_if_needed
from popxl.ops.checks import (
    binary,
    broadcast_spec,
    check_computes_in_one_dtype,
    check_floating,
    check_numeric,
    check_real,
    check_scalar,
    elementwise_cost,
    unary,
)
from popxl.tensor import Tensor, TensorLike, TensorSpec

Grads = tuple[Tensor | None, Tensor | None]
Scalar = float | Tensor


def _add_vjp(dy: Tensor, y: Tensor, lhs: Tensor, rhs: Tensor) -> Grads:
    return sum_to(dy, lhs.shape), sum_to(dy, rhs.shape)


def _sub_vjp(dy: Tensor, y: Tensor, lhs: Tensor, rhs: Tensor) -> Grads:
    return sum_to(dy, lhs.shape), negate(sum_to(dy, rhs.shape))


def _mul_vjp(dy: Tensor, y: Tensor, lhs: Tensor, rhs: Tensor) -> Grads:
    return sum_to(mul(dy, rhs), lhs.shape), sum_to(mul(dy, lhs), rhs.shape)


def _div_vjp(dy: Tensor, y: Tensor, lhs: Tensor, rhs: Tensor) -> Grads:
    dlhs = div(dy, rhs)
    return sum_to(dlhs, lhs.shape), negate(sum_to(mul(dlhs, y), rhs.shape))


def _fmod_vjp(dy: Tensor, y: Tensor, lhs: Tensor, rhs: Tensor) -> Grads:
    # y = lhs - rhs * trunc(lhs / rhs), and the truncated quotient is constant almost everywhere.
    # It is negated last: unsigned integers have no negative ones to divide.
    return sum_to(dy, lhs.shape), sum_to(mul(dy, negate(div(sub(lhs, y), rhs))), rhs.shape)


def division_by_zero() -> ZeroDivisionError:
    """What divisions of integers raise; floating point has infinity and NaN."""
    return ZeroDivisionError(
        "got 0 in the divisor; expected other integers. Put another number there with ops.where, "
        "or divide in floating point."
    )


def _host_div(lhs: Any, rhs: Any) -> Any:
    # the lowest integer / -1 is itself, as in other ops that overflow
    with np.errstate(over="ignore"):
        return (lhs - _host_fmod(lhs, rhs)) // rhs


def _host_fmod(lhs: Any, rhs: Any) -> Any:
    if np.size(lhs) and not np.all(rhs):
        raise division_by_zero()
    return np.fmod(lhs, rhs)


add = binary("add", "Broadcast sum.", _add_vjp, np.add)
add_ = inplace(add, "lhs")
sub = binary("sub", "Broadcast difference, lhs - rhs.", _sub_vjp, np.subtract)
mul = binary("mul", "Broadcast product.", _mul_vjp, np.multiply)
div = binary(
    "div",
    "Broadcast quotient; truncated towards zero for integers, whose divisors must not be zero.",
    _div_vjp,
    _host_div,
)
fmod = binary(
    "fmod",
    "Broadcast remainder of C: it has the sign of lhs. Also for integers, whose divisors must not "
    "be zero.",
    _fmod_vjp,
    _host_fmod,
    "real numbers",
)

negate: Any = unary(
    "negate", "Elementwise -t.", lambda dy, y, t: negate(dy), host=np.negative, takes="numbers"
)
abs = unary(
    "abs",
    "Elementwise absolute value.",
    lambda dy, y, t: mul(dy, sign(t)),
    host=np.abs,
    takes="real numbers",
)
sign: Any = unary(
    "sign", "Elementwise -1, 0 or 1.", lambda dy, y, t: None, host=np.sign, takes="real numbers"
)


# Powers


@op(name="pow")
def _pow(t: Tensor, e: Scalar) -> TensorSpec:
    """Elementwise t**e. See `pow`."""
    check_numeric("pow", t=t)
    if isinstance(e, Tensor):
        return broadcast_spec("pow", t=t, e=e)
    check_scalar("pow", "e", e)
    return t.spec


def pow(t: Tensor, e: float | int | TensorLike) -> Tensor:
    """Elementwise power t**e.

    Shapes: t [a], e a number, or an array or tensor [b] of t's dtype -> [broadcast(a, b)], t's
        dtype.
    Raises:
        DTypeError: if e is a tensor of another dtype.
        ShapeError: if the shapes do not broadcast.
    """
    exponent: Any = e
    if isinstance(t, Tensor):
        is_number = (
            isinstance(e, (int, float)) and not isinstance(e, bool) and t.dtype.is_floating_point
        )
        exponent = float(exponent) if is_number else t._ensure_tensor(e)
    return _pow(t, exponent)


@_pow.vjp
def pow_vjp(dy: Tensor, y: Tensor, t: Tensor, e: Scalar) -> Grads:
    """e * t**(e - 1) for the base, 0 where e is 0; y * log(t) for the exponent, 0 where t is 0."""
    if not isinstance(e, Tensor):
        if e == 0:
            return None, None
        return mul(dy, scale(pow(t, e - 1.0), e)), None
    dt, de = pow_grad(dy, t, e, y)
    return sum_to(dt, t.shape), sum_to(de, e.shape)


@_pow.cost
def pow_cost(y: Tensor, t: Tensor, e: Scalar) -> Cost:
    """A logarithm, a product and an exponential per element."""
    return Cost(flops=3 * y.nelms)


@op(differentiable=False)
def pow_grad(dy: Tensor, t: Tensor, e: Tensor, y: Tensor) -> tuple[TensorSpec, ...]:
    """Gradients of t**e for base and exponent, both in the shape of y."""
    return dy.spec, dy.spec


@pow_grad.cost
def pow_grad_cost(y: tuple[Tensor, Tensor], dy: Tensor, *operands: Tensor) -> Cost:
    """Power and logarithm per element."""
    return Cost(flops=8 * dy.nelms)


# Maximum of several tensors


def _named(ts: tuple[Tensor, ...]) -> Any:
    return {f"ts[{i}]": t for i, t in enumerate(ts)}


@op(host=lambda *ts: np.maximum.reduce(np.broadcast_arrays(*ts)))
def maximum(*ts: Tensor) -> TensorSpec:
    """Elementwise maximum of several tensors. Where several are largest they share the gradient
    evenly.

    Shapes: each [a_i], real numbers of one dtype -> [broadcast of all].
    Raises:
        ShapeError: if there are none, or they do not broadcast.
        DTypeError: if the dtypes differ; from sessions, if they are not real numbers.
    """
    if not ts:
        raise ShapeError("maximum: got no tensors; expected at least one.")
    check_real("maximum", **_named(ts))
    return broadcast_spec("maximum", **_named(ts))


@maximum.vjp
def maximum_vjp(dy: Tensor, y: Tensor, *ts: Tensor) -> tuple[tuple[Tensor, ...]]:
    """The gradient goes to the operand that is largest."""
    return (tuple(sum_to(g, t.shape) for g, t in zip(maximum_grad(dy, y, ts), ts)),)


@maximum.cost
def maximum_cost(y: Tensor, *ts: Tensor) -> Cost:
    """A comparison per element and further operand."""
    return Cost(flops=y.nelms * (len(ts) - 1))


@op(differentiable=False)
def maximum_grad(dy: Tensor, y: Tensor, ts: tuple[Tensor, ...]) -> tuple[TensorSpec, ...]:
    """Gradients of `maximum` for each operand, all in the shape of y."""
    return tuple(dy.spec for _ in ts)


@maximum_grad.cost
def maximum_grad_cost(result: Any, dy: Tensor, y: Tensor, ts: tuple[Tensor, ...]) -> Cost:
    """Comparison, count and product per element and operand."""
    return Cost(flops=3 * dy.nelms * len(ts))


# A tensor and numbers


@op
def scale(t: Tensor, factor: float) -> TensorSpec:
    """Elementwise t * factor, the factor exact also where t is a 16-bit type. Not in PopXL's API.

    Shapes: t [a], floating point -> [a].
    """
    check_floating("scale", t=t)
    return t.spec


@scale.vjp
def scale_vjp(dy: Tensor, y: Tensor, t: Tensor, factor: float) -> Tensor:
    """Scale the gradient by the same factor."""
    return scale(dy, factor)


scale.cost(elementwise_cost)


def integer_bounds(min: float, max: float, lowest: int, highest: int) -> tuple[int, int]:
    """The first and the last of the integers from lowest to highest, which are a type's, in [min,
    max]; where there is none, the nearest.
    """

    def bound(value: float, rounded: Callable[[float], int]) -> int:
        return lowest if value < lowest else highest if value > highest else rounded(value)

    return bound(min, math.ceil), bound(max, math.floor)


def _clip_on_host(t: Any, min: float, max: float) -> Any:
    t = np.asarray(t)
    info = np.iinfo(t.dtype)
    low, high = integer_bounds(min, max, int(info.min), int(info.max))
    return np.minimum(np.maximum(t, t.dtype.type(low)), t.dtype.type(high))


@op(host=_clip_on_host)
def clip(t: Tensor, min: float = float("-inf"), max: float = float("inf")) -> TensorSpec:
    """Elementwise limit to [min, max]: of integers, to those in between that their type has.

    Shapes: t [a], real numbers -> [a].
    Raises:
        ShapeError: if min > max, or one is not a number.
        DTypeError: from sessions, if t is not real numbers.
    """
    check_real("clip", t=t)
    if not min <= max:
        raise ShapeError(f"clip: got min {min} and max {max}; expected min <= max. Swap them.")
    return t.spec


@clip.vjp
def clip_vjp(dy: Tensor, y: Tensor, t: Tensor, min: float, max: float) -> Tensor:
    """The gradient passes where t is inside."""
    return clip_grad(dy, t, min, max)


clip.cost(elementwise_cost)

clamp = clip


@op(differentiable=False)
def clip_grad(dy: Tensor, t: Tensor, min: float, max: float) -> TensorSpec:
    """dy where min <= t <= max, else 0."""
    return dy.spec


clip_grad.cost(elementwise_cost)


def _increment_mod_on_host(t: Any, increment: float, modulus: float) -> Any:
    total = np.asarray(t).astype(np.int64) + int(increment)
    return np.fmod(total, int(modulus)).astype(t.dtype)


@op(host=_increment_mod_on_host)
def increment_mod(t: Tensor, increment: float, modulus: float) -> TensorSpec:
    """Elementwise (t + increment) % modulus, with the remainder's sign that of the sum, as `fmod`.

    Integers are added in int64, 16-bit types in float32.

    Shapes: t [a], real numbers -> [a].
    Raises:
        ValueError: for integers, if the modulus is below one.
        DTypeError: from sessions, if t is not real numbers.
    """
    check_real("increment_mod", t=t)
    if t.dtype.is_int and -1 < modulus < 1:
        raise ValueError(
            f"increment_mod: got modulus {modulus} for t {t.spec}; expected an integer other than "
            "0. Give another one, or cast t to floating point."
        )
    return t.spec


@increment_mod.vjp
def increment_mod_vjp(dy: Tensor, y: Tensor, t: Tensor, increment: float, modulus: float) -> Tensor:
    """The gradient passes unchanged."""
    return dy


increment_mod.cost(elementwise_cost)
increment_mod_ = inplace(increment_mod, "t")


# Weighted sums


def _scaled_add_spec(name: str, X: Tensor, Y: Tensor, a: Scalar, b: Scalar) -> TensorSpec:
    check_scalar(name, "a", a)
    check_scalar(name, "b", b)
    if X.shape != Y.shape:
        raise ShapeError(
            f"{name}: got X {X.spec} and Y {Y.spec}; expected equal shapes. Reshape one operand."
        )
    return X.spec


@op
def scaled_add(X: Tensor, Y: Tensor, a: Scalar = 1.0, b: Scalar = 1.0) -> TensorSpec:
    """Elementwise a * X + b * Y, in float32 for 16-bit types.

    Shapes: X and Y [s], floating point of any two widths or numbers of one dtype; a and b numbers
        or tensors of one element -> [s], X's dtype.
    Raises:
        ShapeError: if X and Y differ in shape, or a or b has several elements.
        DTypeError: from sessions, if X and Y are not real numbers, or differ in dtype and one is
            not floating point.
    """
    check_real("scaled_add", X=X, Y=Y)
    if not (X.dtype.is_floating_point and Y.dtype.is_floating_point):
        check_computes_in_one_dtype("scaled_add", X=X, Y=Y)
    return _scaled_add_spec("scaled_add", X, Y, a, b)


def _times(dy: Tensor, factor: Scalar) -> Tensor:
    if not isinstance(factor, Tensor):
        return dy if factor == 1.0 else scale(dy, float(factor))
    return sum_to(mul(dy, cast_if_needed(factor, dy.dtype)), dy.shape)


def _scalar_grad(dy: Tensor, t: Tensor, factor: Scalar) -> Tensor | None:
    return (
        cast_if_needed(sum_to(mul(dy, t), factor.shape), factor.dtype)
        if isinstance(factor, Tensor)
        else None
    )


@scaled_add.vjp
def scaled_add_vjp(
    dy: Tensor, y: Tensor, X: Tensor, Y: Tensor, a: Scalar, b: Scalar
) -> tuple[Tensor | None, ...]:
    """dy scaled by each factor, in the operand's dtype; for factors that are tensors, the sum of dy
    times the operand.
    """
    return (
        _times(dy, a),
        cast_if_needed(_times(dy, b), Y.dtype),
        _scalar_grad(dy, X, a),
        _scalar_grad(dy, cast_if_needed(Y, dy.dtype), b),
    )


@scaled_add.cost
def scaled_add_cost(y: Tensor, X: Tensor, Y: Tensor, a: Scalar, b: Scalar) -> Cost:
    """Two products and a sum per element."""
    return Cost(flops=3 * y.nelms)


@op(writes=("X",), differentiable=False, names="scaled_add__{X}")
def scaled_add_(X: Tensor, Y: Tensor, a: Scalar = 1.0, b: Scalar = 1.0) -> TensorSpec:
    """Set X to a * X + b * Y and return it. The sum is computed in the wider type and rounded to
    X's once.

    Shapes: X and Y [s], numbers; Y may be of another width than X; a and b numbers or tensors of
        one element -> [s].
    Raises:
        ShapeError: if X and Y differ in shape, or a or b has several elements.
        DTypeError: from sessions, if X or Y is not real numbers.
    """
    check_real("scaled_add_", X=X, Y=Y)
    return _scaled_add_spec("scaled_add_", X, Y, a, b)


scaled_add_.cost(scaled_add_cost)
