"""Reductions over axes, and running sums. 16-bit types accumulate in float32.

``axis`` is an axis, several, or None for all; ``keepdims`` keeps the reduced axes with size 1.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from popxl import dtypes
from popxl.errors import ShapeError
from popxl.opdef import Cost, OpFunction, op
from popxl.ops.arithmetic import div, mul, scale, sign, sub
from popxl.ops.broadcasting import broadcast_to
from popxl.ops.checks import (
    OPERANDS,
    Axis,
    check_floating,
    check_numeric,
    check_real,
    normalise_axes,
    normalise_axis,
)
from popxl.ops.elementwise import exp
from popxl.tensor import Tensor, TensorSpec

Vjp = Callable[[Tensor, Tensor, Tensor, Axis, bool], Tensor | None]


def _reduced(name: str, t: Tensor, axis: Axis, keepdims: bool) -> TensorSpec:
    axes = normalise_axes(name, t, axis)
    if keepdims:
        return TensorSpec((1 if a in axes else n for a, n in enumerate(t.shape)), t.dtype)
    return TensorSpec((n for a, n in enumerate(t.shape) if a not in axes), t.dtype)


@op(differentiable=False)
def extremum_grad(dy: Tensor, y: Tensor, t: Tensor, axis: Axis, keepdims: bool) -> TensorSpec:
    """Gradient of `max` and `min`: dy to the elements that equal y, in equal shares."""
    return t.spec


@op(differentiable=False)
def prod_grad(dy: Tensor, t: Tensor, axis: Axis, keepdims: bool) -> TensorSpec:
    """Gradient of `prod`: dy times the product of the other elements, right also where some are
    0.
    """
    return t.spec


@op(differentiable=False)
def median_grad(dy: Tensor, t: Tensor, axis: Axis, keepdims: bool) -> TensorSpec:
    """Gradient of `median`: dy to the element that was selected."""
    return t.spec


@op(differentiable=False)
def l2_grad(dy: Tensor, y: Tensor, t: Tensor) -> TensorSpec:
    """Gradient of `l2`: dy * t / y, and 0 where y is; dy and y broadcast against t."""
    return t.spec


for _grad, _flops in ((extremum_grad, 3), (prod_grad, 4), (median_grad, 4), (l2_grad, 2)):
    _grad.cost(lambda result, *arguments, _flops=_flops: Cost(flops=_flops * result.nelms))


def _reduction(
    name: str,
    doc: str,
    vjp: Vjp,
    host: Any = None,
    takes: str = "floating point",
    flops: int = 1,
    nonempty: bool = False,
) -> OpFunction[..., Tensor]:
    def fn(t: Tensor, axis: Axis = None, keepdims: bool = False) -> TensorSpec:
        OPERANDS[takes](name, t=t)
        spec = _reduced(name, t, axis, keepdims)
        if nonempty and t.nelms == 0:
            raise ShapeError(f"{name}: got t {t.spec}; expected at least one element.")
        return spec

    fn.__name__, fn.__module__ = name, __name__
    fn.__doc__ = (
        f"{doc}\n\nShapes: t [a], {takes} -> a without the reduced axes, t's dtype.\n"
        "Args:\n    axis: axis or axes to reduce, negative ones counted from the end; None: all.\n"
        "    keepdims: keep them with size 1.\n"
        "Raises:\n    ShapeError: for an axis that t lacks, or one given twice.\n"
        f"    DTypeError: from sessions, if t is not {takes}."
    )
    result = op(host=host)(fn)
    result.vjp(vjp)
    result.cost(lambda y, t, axis, keepdims: Cost(flops=flops * t.nelms))
    return result


def _new_axes(t: Tensor, axis: Axis, keepdims: bool) -> tuple[int, ...]:
    """Axes of ``t`` that its reduction lacks."""
    return () if keepdims else normalise_axes("reduction", t, axis)


def _spread(d: Tensor, t: Tensor, axis: Axis, keepdims: bool) -> Tensor:
    """A reduced tensor repeated to ``t``'s shape."""
    return broadcast_to(d, t.shape, _new_axes(t, axis, keepdims))


def _aligned(d: Tensor, t: Tensor, axis: Axis, keepdims: bool) -> Tensor:
    """A reduced tensor with size-1 axes where it was reduced, so that it broadcasts against
    ``t``.
    """
    return (
        d
        if keepdims
        else broadcast_to(
            d, _reduced("reduction", t, axis, True).shape, _new_axes(t, axis, keepdims)
        )
    )


def _count(t: Tensor, axis: Axis) -> int:
    return math.prod(t.shape[a] for a in normalise_axes("mean", t, axis))


def _l2_vjp(dy: Tensor, y: Tensor, t: Tensor, axis: Axis, keepdims: bool) -> Tensor:
    return l2_grad(_aligned(dy, t, axis, keepdims), _aligned(y, t, axis, keepdims), t)


def _logsumexp_vjp(dy: Tensor, y: Tensor, t: Tensor, axis: Axis, keepdims: bool) -> Tensor:
    return mul(exp(sub(t, _aligned(y, t, axis, keepdims))), _aligned(dy, t, axis, keepdims))


def _keep_dtype(fn: Callable[..., Any]) -> Callable[..., Any]:
    """numpy's sum and product of small integers in the operand's own dtype."""
    return lambda t, axis, keepdims: fn(t, axis=axis, keepdims=keepdims, dtype=np.asarray(t).dtype)


def _host(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda t, axis, keepdims: fn(t, axis=axis, keepdims=keepdims)


sum = _reduction(
    "sum",
    "Sum over axes.",
    lambda dy, y, t, axis, keepdims: _spread(dy, t, axis, keepdims),
    host=_keep_dtype(np.sum),
    takes="numbers",
)
mean = _reduction(
    "mean",
    "Arithmetic mean.",
    lambda dy, y, t, axis, keepdims: _spread(scale(dy, 1.0 / _count(t, axis)), t, axis, keepdims),
    nonempty=True,
)
prod = _reduction(
    "prod",
    "Product over axes.",
    lambda dy, y, t, axis, keepdims: prod_grad(dy, t, axis, keepdims),
    host=_keep_dtype(np.prod),
    takes="numbers",
)
max = _reduction(
    "max",
    "Maximum. Where several elements are largest they share the gradient evenly.",
    lambda dy, y, t, axis, keepdims: extremum_grad(dy, y, t, axis, keepdims),
    host=_host(np.max),
    takes="real numbers",
    nonempty=True,
)
min = _reduction(
    "min",
    "Minimum. Where several elements are smallest they share the gradient evenly.",
    lambda dy, y, t, axis, keepdims: extremum_grad(dy, y, t, axis, keepdims),
    host=_host(np.min),
    takes="real numbers",
    nonempty=True,
)
l1 = _reduction(
    "l1",
    "Sum of absolute values.",
    lambda dy, y, t, axis, keepdims: mul(sign(t), _aligned(dy, t, axis, keepdims)),
    flops=2,
)
l2 = _reduction(
    "l2", "Square root of the sum of squares. Its gradient is 0 where the sum is.", _l2_vjp, flops=2
)
sumsquare = _reduction(
    "sumsquare",
    "Sum of squares.",
    lambda dy, y, t, axis, keepdims: mul(t, _aligned(scale(dy, 2.0), t, axis, keepdims)),
    flops=2,
)
logsum = _reduction(
    "logsum",
    "Natural logarithm of the sum.",
    lambda dy, y, t, axis, keepdims: _spread(div(dy, exp(y)), t, axis, keepdims),
)
logsumexp = _reduction(
    "logsumexp", "Natural logarithm of the sum of e**t, without overflow.", _logsumexp_vjp, flops=9
)
median = _reduction(
    "median",
    "Median: of an even number of elements the lower of the two in the middle.",
    lambda dy, y, t, axis, keepdims: median_grad(dy, t, axis, keepdims),
    takes="real numbers",
    nonempty=True,
    flops=4,
)


# Positions of extremes


def _positions(name: str, t: Tensor, dim: int | None, keepdim: bool | None) -> TensorSpec:
    check_real(name, t=t)
    axes: Axis = None if dim is None else normalise_axis(name, t, dim)
    spec = _reduced(name, t, axes, bool(keepdim))
    if t.nelms == 0:
        raise ShapeError(f"{name}: got t {t.spec}; expected at least one element.")
    return TensorSpec(spec.shape, dtypes.int32)


def _host_positions(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda t, dim, keepdim: fn(t, axis=dim, keepdims=bool(keepdim)).astype(np.int32)


@op(differentiable=False, host=_host_positions(np.argmax))
def argmax(t: Tensor, dim: int | None = 0, keepdim: bool | None = False) -> TensorSpec:
    """Index of the largest element, the first of them where several are.

    Shapes: t [a], numbers -> a without axis dim, int32.
    Args:
        dim: axis to search; None: the index is into the flattened tensor.
        keepdim: keep the axis with size 1.
    Raises:
        ShapeError: for an axis that t lacks, or a t without elements.
        DTypeError: from sessions, if t is not real numbers.
    """
    return _positions("argmax", t, dim, keepdim)


@op(differentiable=False, host=_host_positions(np.argmin))
def argmin(t: Tensor, dim: int | None = 0, keepdim: bool | None = False) -> TensorSpec:
    """Index of the smallest element, the first of them where several are.

    Shapes: t [a], numbers -> a without axis dim, int32.
    Args:
        dim: axis to search; None: the index is into the flattened tensor.
        keepdim: keep the axis with size 1.
    Raises:
        ShapeError: for an axis that t lacks, or a t without elements.
        DTypeError: from sessions, if t is not real numbers.
    """
    return _positions("argmin", t, dim, keepdim)


for _position in (argmax, argmin):
    _position.cost(lambda y, t, dim, keepdim: Cost(flops=t.nelms))


# Running sums


@op
def cumsum(t: Tensor, dim: int | None = 0) -> TensorSpec:
    """Running sum along an axis, each element included.

    Shapes: t [a], numbers -> [a].
    Raises:
        ShapeError: for an axis that t lacks.
        DTypeError: from sessions, if t is not numbers.
    """
    check_numeric("cumsum", t=t)
    normalise_axis("cumsum", t, dim or 0)
    return TensorSpec(t.shape, t.dtype)


@cumsum.vjp
def cumsum_vjp(dy: Tensor, y: Tensor, t: Tensor, dim: int | None) -> Tensor:
    """Running sum of the gradient from the end."""
    return cumsum_grad(dy, dim or 0)


@op(differentiable=False)
def cumsum_grad(dy: Tensor, dim: int) -> TensorSpec:
    """Running sum along an axis from its end."""
    return dy.spec


cumsum.cost(lambda y, t, dim: Cost(flops=t.nelms))
cumsum_grad.cost(lambda y, dy, dim: Cost(flops=dy.nelms))


@op(differentiable=False)
def lamb_square(t: Tensor) -> TensorSpec:
    """Sum of the squares of this replica's elements in float32. `popxl.ops.lamb` adds those of
    other shards.

    Shapes: t [a], floating point -> [], float32.
    Raises:
        DTypeError: from sessions, if t is not floating point.
    """
    check_floating("lamb_square", t=t)
    return TensorSpec((), dtypes.float32)


lamb_square.cost(lambda y, t: Cost(flops=2 * t.nelms))


# Counts


@op(differentiable=False)
def histogram(t: Tensor, levels: list[float], absolute_of_input: bool) -> TensorSpec:
    """How many elements lie between levels.

    Bin 0 counts those below levels[0], bin i those from levels[i - 1] to below levels[i], the last
    bin the rest.

    Shapes: t [a], floating point -> [len(levels) + 1], uint32.
    Args:
        levels: bounds of the bins, rounded to t's dtype when they are compared. NaN counts above
            them all.
        absolute_of_input: count absolute values.
    Raises:
        ValueError: unless each level is larger than the one before.
        DTypeError: from sessions, if t is not floating point.
    """
    check_floating("histogram", t=t)
    if any(not low < high for low, high in zip(levels, levels[1:])):
        raise ValueError(
            f"histogram: got levels {list(levels)}; expected each larger than the one before."
        )
    return TensorSpec((len(levels) + 1,), dtypes.uint32)


@histogram.cost
def histogram_cost(y: Tensor, t: Tensor, levels: list[float], absolute_of_input: bool) -> Cost:
    """A binary search among the levels per element."""
    return Cost(flops=t.nelms * (len(levels) + 1).bit_length())
