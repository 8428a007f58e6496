"""Matrix products."""

from typing import Any

import numpy as np

from popxl import dtypes
from popxl.dtypes import dtype
from popxl.errors import DTypeError, ShapeError
from popxl.opdef import Cost, op
from popxl.ops.broadcasting import sum_to
from popxl.ops.casting import cast_if_needed
from popxl.ops.checks import (
    check_computes_in_one_dtype,
    check_float8,
    check_log2_scale,
    check_numeric,
    refuse_to_execute,
)
from popxl.ops.shape import reshape, transpose
from popxl.spec import check_dtype
from popxl.tensor import Tensor, TensorSpec


def _matrix_shapes(lhs: Tensor, rhs: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Both shapes with at least two axes, as numpy.matmul treats vectors: a row on the left, a
    column on the right.
    """
    left = (1, *lhs.shape) if lhs.rank == 1 else lhs.shape
    right = (*rhs.shape, 1) if rhs.rank == 1 else rhs.shape
    return left, right


def _product_shape(name: str, lhs: Tensor, rhs: Tensor) -> tuple[int, ...]:
    """The shape of a matrix product. ShapeError if there is none."""
    given = f"{name}: got lhs {lhs.spec} and rhs {rhs.spec}"
    if not lhs.rank or not rhs.rank:
        raise ShapeError(f"{given}; expected at least one axis each. Use ops.mul for scalars.")
    left, right = _matrix_shapes(lhs, rhs)
    if left[-1] != right[-2]:
        raise ShapeError(
            f"{given}; expected lhs's last axis equal to rhs's second-to-last. Transpose or "
            "reshape one operand."
        )
    try:
        batch = np.broadcast_shapes(left[:-2], right[:-2])
    except ValueError:
        raise ShapeError(
            f"{given}; expected leading axes that broadcast: equal, or 1. Reshape one operand."
        ) from None
    rows = () if lhs.rank == 1 else (left[-2],)
    columns = () if rhs.rank == 1 else (right[-1],)
    return (*batch, *rows, *columns)


@op(name="matmul")
def _matmul(
    lhs: Tensor,
    rhs: Tensor,
    available_memory_proportion: float | None = None,
    output_type: dtype | None = None,
    partials_type: dtype | None = None,
) -> TensorSpec:
    """Matrix product of operands of one dtype; `matmul` documents it."""
    check_numeric("matmul", lhs=lhs, rhs=rhs)
    check_computes_in_one_dtype("matmul", lhs=lhs, rhs=rhs)
    shape = _product_shape("matmul", lhs, rhs)
    lhs.ir._pb_ir.getSessionOptions().check()
    if output_type is not None:
        check_dtype("matmul: output_type", output_type)
    if partials_type not in (None, dtypes.float16, dtypes.float32):
        raise ValueError(
            f"matmul: got partials_type {partials_type!r}; expected float16 or float32."
        )
    if output_type is not None and output_type.is_floating_point != lhs.dtype.is_floating_point:
        error = (
            f"matmul: got output_type {output_type.name} for lhs {lhs.spec}; expected a dtype of "
            "the same kind."
        )
        refuse_to_execute(DTypeError(error))
    return TensorSpec(shape, output_type or lhs.dtype)


def matmul(
    lhs: Tensor,
    rhs: Tensor,
    available_memory_proportion: float | None = None,
    output_type: dtype | None = None,
    partials_type: dtype | None = None,
) -> Tensor:
    """Matrix product over the last two axes, leading axes broadcast; 16-bit types accumulate in
    float32.

    Floating-point operands of two types are multiplied in the wider one, float16 and bfloat16 in
    float32, and the result is rounded once.

    Shapes: lhs [..., m, k], rhs [..., k, n], numbers -> [..., m, n]. A vector on the left is a row,
    one on the right a column, and the result lacks that axis.
    Args:
        available_memory_proportion: kept; has no effect here.
        output_type: dtype of the result; default: lhs's.
        partials_type: float16 or float32; kept, accumulation is always in float32 or wider. So is
            the session option ``partialsTypeMatMuls``, its default.
    Raises:
        ShapeError: if the inner axes differ, the leading axes do not broadcast, or an operand is a
            scalar.
        DTypeError: from sessions, if the dtypes differ and are not both floating point, or are
            bool.
        ValueError: for another partials_type, or an unknown value of the session option.
    """
    if _are_two_widths(lhs, rhs):
        wide = dtypes.float64 if dtypes.float64 in (lhs.dtype, rhs.dtype) else dtypes.float32
        output_type = output_type or lhs.dtype
        lhs, rhs = cast_if_needed(lhs, wide), cast_if_needed(rhs, wide)
    return _matmul(lhs, rhs, available_memory_proportion, output_type, partials_type)


def _are_two_widths(*operands: Any) -> bool:
    """Whether these are tensors of different floating-point types that ops compute with."""
    found = {t.dtype for t in operands if isinstance(t, Tensor)}
    return len(found) > 1 and all(of.is_floating_point and of.itemsize > 1 for of in found)


def _swap(t: Tensor) -> Tensor:
    """The last two axes exchanged."""
    return transpose(t, (*range(t.rank - 2), t.rank - 1, t.rank - 2))


def _as(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    return t if t.shape == shape else reshape(t, shape)


@_matmul.vjp
def matmul_vjp(
    dy: Tensor,
    y: Tensor,
    lhs: Tensor,
    rhs: Tensor,
    available_memory_proportion: float | None,
    output_type: dtype | None,
    partials_type: dtype | None,
) -> tuple[Tensor, Tensor]:
    """dy @ rhs^T and lhs^T @ dy, summed over what was broadcast; one large product where rhs is a
    matrix.
    """
    dy = cast_if_needed(dy, lhs.dtype)
    left, right = _matrix_shapes(lhs, rhs)
    batch = np.broadcast_shapes(left[:-2], right[:-2])
    matrix_dy = _as(dy, (*batch, left[-2], right[-1]))
    matrix_lhs, matrix_rhs = _as(lhs, left), _as(rhs, right)
    dlhs = sum_to(matmul(matrix_dy, _swap(matrix_rhs)), left)
    if len(right) == 2:
        rows = (-1, left[-1]), (-1, right[-1])
        flat_lhs = matrix_lhs if len(left) == 2 else reshape(matrix_lhs, rows[0])
        flat_dy = matrix_dy if len(batch) == 0 else reshape(matrix_dy, rows[1])
        drhs = matmul(_swap(flat_lhs), flat_dy)
    else:
        drhs = sum_to(matmul(_swap(matrix_lhs), matrix_dy), right)
    return _as(dlhs, lhs.shape), cast_if_needed(_as(drhs, rhs.shape), rhs.dtype)


@_matmul.cost
def matmul_cost(y: Tensor, lhs: Tensor, rhs: Tensor, *options: object) -> Cost:
    """A product and a sum for each term of each element."""
    return Cost(flops=2 * y.nelms * lhs.shape[-1])


@op(differentiable=False)
def matmul_pow2scaled(
    lhs: Tensor,
    rhs: Tensor,
    log2_scale: Tensor,
    available_memory_proportion: float | None = None,
) -> TensorSpec:
    """Matrix product of float8 tensors times ``2**log2_scale``, accumulated in float32 and rounded
    once to float16.

    Shapes: as for `matmul`; lhs and rhs float8, of one or both types; log2_scale [], int32 ->
        float16.
    Args:
        log2_scale: from -32 to 31; another value is a ValueError when the program runs.
        available_memory_proportion: kept; has no effect here.
    Raises:
        ShapeError: as `matmul`, or if the scale is not a scalar.
        DTypeError: if an operand is not float8, or the scale is not int32.
    """
    check_float8("matmul_pow2scaled", lhs=lhs, rhs=rhs)
    check_log2_scale("matmul_pow2scaled", log2_scale)
    return TensorSpec(_product_shape("matmul_pow2scaled", lhs, rhs), dtypes.float16)


matmul_pow2scaled.cost(matmul_cost)
