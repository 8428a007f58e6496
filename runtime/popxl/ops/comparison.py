"""Elementwise comparisons, logic and classification; the results are bool."""

from typing import Any

import numpy as np

from popxl import dtypes
from popxl.opdef import OpFunction, op
from popxl.ops.checks import (
    broadcast_shape,
    broadcast_spec,
    check_floating,
    check_not_complex,
    check_not_float8,
    elementwise_cost,
)
from popxl.tensor import Tensor, TensorSpec


def _boolean(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(spec.shape, dtypes.bool, spec.meta_shape)


@op(differentiable=False, host=np.equal)
def equal(lhs: Tensor, rhs: Tensor) -> TensorSpec:
    """Elementwise lhs == rhs.

    Shapes: lhs [a], rhs [b], one dtype -> [broadcast(a, b)], bool.
    Raises:
        DTypeError: if the dtypes differ; from sessions, if they are float8.
        ShapeError: if the shapes do not broadcast.
    """
    check_not_float8("equal", lhs=lhs, rhs=rhs)
    return _boolean(broadcast_spec("equal", lhs=lhs, rhs=rhs))


@op(differentiable=False, host=np.greater)
def greater(input: Tensor, other: Tensor) -> TensorSpec:
    """Elementwise input > other.

    Shapes: input [a], other [b], one dtype -> [broadcast(a, b)], bool.
    Raises:
        DTypeError: if the dtypes differ; from sessions, if they are float8 or complex.
        ShapeError: if the shapes do not broadcast.
    """
    check_not_float8("greater", input=input, other=other)
    check_not_complex("greater", input=input, other=other)
    return _boolean(broadcast_spec("greater", input=input, other=other))


def _logical(name: str, doc: str, host: Any) -> OpFunction[..., Tensor]:
    def fn(lhs: Tensor, rhs: Tensor) -> TensorSpec:
        check_not_float8(name, lhs=lhs, rhs=rhs)
        return TensorSpec(broadcast_shape(name, lhs=lhs, rhs=rhs), dtypes.bool)

    fn.__name__, fn.__module__ = name, __name__
    fn.__doc__ = (
        f"{doc} Numbers are true where they are not zero.\n\nShapes: lhs [a], rhs [b], any dtypes "
        "but float8 -> [broadcast(a, b)], bool.\nRaises:\n    ShapeError: if the shapes do not "
        "broadcast.\n    DTypeError: from sessions, if one is float8."
    )
    return op(differentiable=False, host=host)(fn)


logical_and = _logical("logical_and", "Elementwise: both are true.", np.logical_and)
logical_or = _logical("logical_or", "Elementwise: one or both are true.", np.logical_or)


@op(differentiable=False, host=np.logical_not)
def logical_not(t: Tensor) -> TensorSpec:
    """Elementwise: false where t is true, or a number that is not zero.

    Shapes: t [a], any dtype but float8 -> [a], bool.
    Raises:
        DTypeError: from sessions, if t is float8.
    """
    check_not_float8("logical_not", t=t)
    return _boolean(t.spec)


def _classification(name: str, doc: str) -> OpFunction[..., Tensor]:
    def fn(t: Tensor) -> TensorSpec:
        check_floating(name, t=t)
        return _boolean(t.spec)

    fn.__name__, fn.__module__ = name, __name__
    fn.__doc__ = (
        f"{doc}\n\nShapes: t [a], floating point -> [a], bool.\n"
        "Raises:\n    DTypeError: from sessions, if t is not floating point."
    )
    return op(differentiable=False)(fn)


isfinite = _classification("isfinite", "Elementwise: neither infinite nor NaN.")
isinf = _classification("isinf", "Elementwise: infinite, of either sign.")
isnan = _classification("isnan", "Elementwise: not a number.")

for _comparison in (equal, greater, logical_and, logical_or, logical_not, isfinite, isinf, isnan):
    _comparison.cost(elementwise_cost)
