"""What op declarations share: checks of operands, axes and broadcasting, and constructors of
elementwise families.

As in PopXL, building a program does not ask which numbers an op computes with: checks of that
refuse to execute it.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from popxl import dtypes
from popxl.context import get_current_context
from popxl.errors import DTypeError, ShapeError
from popxl.fp8_utils import FLOAT8, FORMATS
from popxl.opdef import Cost, OpFunction, op
from popxl.tensor import Tensor, TensorSpec

Axis = int | Iterable[int] | None


def refuse_to_execute(error: Exception) -> None:
    """Note why the op that is being added cannot be executed: it is built, and sessions raise this
    error.
    """
    context = get_current_context()
    context.refusal = context.refusal or error


def check_numeric(name: str, **tensors: Tensor) -> None:
    """Refuse to execute unless every tensor holds numbers (bool does not count)."""
    for parameter, t in tensors.items():
        if not (t.dtype.is_int or t.dtype.is_floating_point or t.dtype.is_complex) or _is_float8(t):
            refuse_to_execute(
                DTypeError(f"{name}: got {parameter} {t.spec}; expected numbers. {_cast_of(t)}")
            )


def check_real(name: str, **tensors: Tensor) -> None:
    """Refuse to execute unless every tensor holds numbers that have an order."""
    check_numeric(name, **tensors)
    check_not_complex(name, **tensors)


def check_not_complex(name: str, **tensors: Tensor) -> None:
    """Refuse to execute if a tensor is complex, for ops that ask which element is larger."""
    for parameter, t in tensors.items():
        if t.dtype.is_complex:
            error = (
                f"{name}: got {parameter} {t.spec}; expected real numbers. Complex ones are not "
                "ordered."
            )
            refuse_to_execute(DTypeError(error))


def check_floating(name: str, **tensors: Tensor) -> None:
    """Refuse to execute unless every tensor is floating point of 16 bits or more."""
    for parameter, t in tensors.items():
        if not t.dtype.is_floating_point or _is_float8(t):
            error = (
                f"{name}: got {parameter} {t.spec}; expected floating point of 16 bits or more. "
                f"{_cast_of(t)}"
            )
            refuse_to_execute(DTypeError(error))


OPERANDS: dict[str, Callable[..., None]] = {
    "numbers": check_numeric,
    "real numbers": check_real,
    "floating point": check_floating,
}
"""What an op may say that it takes, and the check of it."""


def _is_float8(t: Tensor) -> bool:
    return t.dtype in FLOAT8


def _cast_of(t: Tensor) -> str:
    return f"Cast it with ops.{'pow2scale_cast_from_fp8' if _is_float8(t) else 'cast'}."


def check_not_float8(name: str, **tensors: Tensor) -> None:
    """Refuse to execute if a tensor is float8, which only casts and scaled products compute
    with.
    """
    for parameter, t in tensors.items():
        if _is_float8(t):
            error = (
                f"{name}: got {parameter} {t.spec}; expected another type than float8. "
                f"{_cast_of(t)}"
            )
            refuse_to_execute(DTypeError(error))


def check_indices(name: str, parameter: str, indices: Tensor) -> None:
    """Refuse to execute unless ``indices`` are integers."""
    if not indices.dtype.is_int:
        error = (
            f"{name}: got {parameter} {indices.spec}; expected integers. Cast them to popxl.int32."
        )
        refuse_to_execute(DTypeError(error))


def check_float8(name: str, **tensors: Tensor) -> None:
    """DTypeError unless every tensor is of one of PopXL's float8 types."""
    for parameter, t in tensors.items():
        if t.dtype not in FORMATS:
            raise DTypeError(
                f"{name}: got {parameter} {t.spec}; expected float8_143 or float8_152. Cast it "
                "with ops.pow2scale_cast_to_fp8."
            )


def check_log2_scale(name: str, log2_scale: Tensor) -> None:
    """DTypeError or ShapeError unless ``log2_scale`` is a scalar of int32."""
    if log2_scale.dtype is not dtypes.int32:
        raise DTypeError(
            f"{name}: got log2_scale {log2_scale.spec}; expected int32. Cast it with ops.cast."
        )
    if log2_scale.shape:
        raise ShapeError(
            f"{name}: got log2_scale {log2_scale.spec}; expected a scalar, shape []. Reshape it."
        )


def check_same_dtype(name: str, **tensors: Tensor) -> None:
    """DTypeError unless all tensors have one dtype, where that decides the result's."""
    if error := _unequal(name, tensors):
        raise error


def check_computes_in_one_dtype(name: str, **tensors: Tensor) -> None:
    """Refuse to execute unless all tensors have one dtype, where the first one's is the result's
    anyway.
    """
    if error := _unequal(name, tensors):
        refuse_to_execute(error)


def _unequal(name: str, tensors: Mapping[str, Tensor]) -> DTypeError | None:
    if len({t.dtype for t in tensors.values()}) <= 1:
        return None
    given = ", ".join(f"{parameter} {t.spec}" for parameter, t in tensors.items())
    return DTypeError(
        f"{name}: got {given}; expected equal dtypes. Cast one operand with ops.cast."
    )


def check_scalar(name: str, parameter: str, value: Any) -> None:
    """ShapeError unless ``value`` is a number or a tensor of one element."""
    if isinstance(value, Tensor):
        if value.nelms != 1:
            raise ShapeError(
                f"{name}: got {parameter} {value.spec}; expected a number or a tensor of one "
                "element. Reduce it first."
            )
    elif not isinstance(value, (int, float, np.number)):
        raise DTypeError(
            f"{name}: got {parameter} = {type(value).__name__}; expected a number or a tensor "
            "of one element."
        )


def broadcast_shape(name: str, **tensors: Tensor) -> tuple[int, ...]:
    """numpy's broadcast of the tensors' shapes. ShapeError if they do not fit."""
    try:
        return np.broadcast_shapes(*(t.shape for t in tensors.values()))
    except ValueError:
        given = " and ".join(f"{parameter} {t.spec}" for parameter, t in tensors.items())
        raise ShapeError(
            f"{name}: got {given}; expected shapes that broadcast: equal, or 1, from the last "
            "axis. Reshape one operand."
        ) from None


def broadcast_spec(name: str, **tensors: Tensor) -> TensorSpec:
    """Spec of an elementwise result: broadcast shape, common dtype, and an operand's meta_shape if
    it is a shard.
    """
    check_same_dtype(name, **tensors)
    shape = broadcast_shape(name, **tensors)
    first = next(iter(tensors.values()))
    meta = next((t.meta_shape for t in tensors.values() if t.meta_shape and t.shape == shape), ())
    return TensorSpec(shape, first.dtype, meta)


def normalise_axis(name: str, t: Tensor, axis: int) -> int:
    """``axis`` counted from the front. ShapeError if ``t`` has no such axis."""
    if not -t.rank <= axis < t.rank:
        raise ShapeError(
            f"{name}: got axis {axis} for t {t.spec}; expected {-t.rank} <= axis < {t.rank}."
        )
    return int(axis) % t.rank


def normalise_axes(name: str, t: Tensor, axis: Axis) -> tuple[int, ...]:
    """The axes that ``axis`` names, ascending: all of them for None. ShapeError for an unknown or
    repeated axis.
    """
    if axis is None:
        return tuple(range(t.rank))
    axes = [
        normalise_axis(name, t, a)
        for a in ((axis,) if isinstance(axis, (int, np.integer)) else axis)
    ]
    if len(set(axes)) != len(axes):
        raise ShapeError(f"{name}: got axis {axis} for t {t.spec}; expected each axis once.")
    return tuple(sorted(axes))


def elementwise_cost(y: Tensor, *arguments: Any, **options: Any) -> Cost:
    """One operation per element of the result."""
    return Cost(flops=y.nelms)


def unary(
    name: str,
    doc: str,
    vjp: Callable[[Tensor, Tensor, Tensor], Tensor | None],
    host: Any = None,
    takes: str = "floating point",
    flops: int = 1,
) -> OpFunction[..., Tensor]:
    """Declare an elementwise op of one tensor: ``t [a] -> [a]``, of t's dtype.

    Args:
        vjp: ``(dy, y, t) -> gradient of t``, or None where it is zero everywhere.
        takes: a key of `OPERANDS`.
        flops: operations per element.
    """

    def fn(t: Tensor) -> TensorSpec:
        OPERANDS[takes](name, t=t)
        return t.spec

    family = sys._getframe(1)
    fn.__name__, fn.__module__ = name, family.f_globals["__name__"]
    fn.__doc__ = (
        f"{doc}\n\nShapes: t [a], {takes} -> [a], t's dtype.\n"
        f"Raises:\n    DTypeError: from sessions, if t is not {takes}."
    )
    result = op(host=host)(fn)
    # the family's, where its rules are to be found
    result.definition.file = family.f_code.co_filename
    result.vjp(vjp)
    result.cost(lambda y, t: Cost(flops=flops * y.nelms))
    return result


def binary(
    name: str,
    doc: str,
    vjp: Callable[..., tuple[Tensor | None, Tensor | None]],
    host: Any,
    takes: str = "numbers",
) -> OpFunction[..., Tensor]:
    """Declare an elementwise op of two tensors of one dtype that broadcast against each other.

    Args:
        vjp: ``(dy, y, lhs, rhs) -> gradients of lhs and rhs``, in their shapes.
        takes: a key of `OPERANDS`.
    """

    def fn(lhs: Tensor, rhs: Tensor) -> TensorSpec:
        OPERANDS[takes](name, lhs=lhs, rhs=rhs)
        return broadcast_spec(name, lhs=lhs, rhs=rhs)

    family = sys._getframe(1)
    fn.__name__, fn.__module__ = name, family.f_globals["__name__"]
    fn.__doc__ = (
        f"{doc}\n\nShapes: lhs [a], rhs [b], {takes} of one dtype -> [broadcast(a, b)], the same "
        "dtype.\nRaises:\n    DTypeError: if the dtypes differ; from sessions, if they are not "
        f"{takes}.\n    ShapeError: if the shapes do not broadcast."
    )
    result = op(host=host)(fn)
    # the family's, where its rules are to be found
    result.definition.file = family.f_code.co_filename
    result.vjp(vjp)
    result.cost(elementwise_cost)
    return result
