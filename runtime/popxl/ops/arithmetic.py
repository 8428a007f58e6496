"""Elementwise arithmetic of two tensors that broadcast against each other."""

from typing import Tuple

import numpy as np

from popxl.errors import DTypeError, ShapeError
from popxl.opdef import Cost, inplace, op
from popxl.values import Tensor, TensorSpec


def broadcast_shape(name: str, lhs: Tensor, rhs: Tensor) -> Tuple[int, ...]:
    """numpy's broadcast of two shapes. ShapeError if they do not fit."""
    try:
        return np.broadcast_shapes(lhs.shape, rhs.shape)
    except ValueError:
        raise ShapeError(
            f"{name}: got lhs {lhs.spec} and rhs {rhs.spec}; expected shapes that broadcast: equal, or 1, from the last axis. "
            "Reshape one operand."
        ) from None


def binary_spec(name: str, lhs: Tensor, rhs: Tensor) -> TensorSpec:
    """Spec of an elementwise result: broadcast shape, the common dtype, the shard's meta_shape where one operand has it."""
    if lhs.dtype is not rhs.dtype:
        raise DTypeError(f"{name}: got lhs {lhs.spec} and rhs {rhs.spec}; expected equal dtypes. Cast one operand with ops.cast.")
    shape = broadcast_shape(name, lhs, rhs)
    meta = next((t.meta_shape for t in (lhs, rhs) if t.meta_shape and t.shape == shape), ())
    return TensorSpec(shape, lhs.dtype, meta)


def elementwise_cost(y: Tensor, *arguments: object) -> Cost:
    """One operation per element of the result."""
    return Cost(flops=y.nelms)


def binary(name: str, host: object, doc: str) -> "object":
    """Declare an elementwise op of two tensors of one dtype."""

    def fn(lhs: Tensor, rhs: Tensor) -> TensorSpec:
        return binary_spec(name, lhs, rhs)

    fn.__name__, fn.__doc__, fn.__module__ = name, doc, __name__
    result = op(fn, host=host)
    result.cost(elementwise_cost)
    return result


add = binary("add", np.add, "Broadcast sum: lhs [a], rhs [b] -> [broadcast(a, b)]; equal dtypes.")
add_ = inplace(add, "lhs")
