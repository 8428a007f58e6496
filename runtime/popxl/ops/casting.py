"""Conversion between element types."""

from popxl import dtypes
from popxl.dtypes import dtype
from popxl.errors import DTypeError
from popxl.fp8_utils import FLOAT8, FORMATS
from popxl.opdef import Cost, op
from popxl.ops.checks import check_float8, check_log2_scale, elementwise_cost, refuse_to_execute
from popxl.spec import check_dtype
from popxl.tensor import Tensor, TensorSpec


@op(host=lambda t, data_type: t.astype(data_type.as_numpy()), names="{t}_{data_type.name}")
def cast(t: Tensor, data_type: dtype) -> TensorSpec:
    """Convert the element type: floating point to the nearest, or truncated towards zero if the
    target is an integer.

    Shapes: t [a], any dtype but float8 -> [a] of data_type.
    Raises:
        DTypeError: for a float8 type on either side, which pow2scale_cast_to_fp8 and
            pow2scale_cast_from_fp8 convert; from sessions, from complex numbers to others.
    """
    check_dtype("cast: data_type", data_type)
    for what, given in (("t", t.dtype), ("data_type", data_type)):
        if given in FLOAT8:
            raise DTypeError(
                f"cast: got {what} {given.name}; expected a type of 16 bits or more. Use the "
                "pow2scale_cast ops for float8."
            )
    if t.dtype.is_complex and not data_type.is_complex:
        error = (
            f"cast: got t {t.spec} and data_type {data_type.name}; expected a complex type for "
            "complex numbers."
        )
        refuse_to_execute(DTypeError(f"{error} Their imaginary part has no place in another."))
    return TensorSpec(t.shape, data_type, t.meta_shape)


@cast.vjp
def cast_vjp(dy: Tensor, y: Tensor, t: Tensor, data_type: dtype) -> Tensor | None:
    """Cast back."""
    return cast(dy, t.dtype)


@cast.cost
def cast_cost(y: Tensor, t: Tensor, data_type: dtype) -> Cost:
    """Moves data only."""
    return Cost()


def cast_if_needed(t: Tensor, data_type: dtype) -> Tensor:
    """`cast`, or ``t`` itself if it is of that dtype already."""
    return t if t.dtype is data_type else cast(t, data_type)


WIDE = (dtypes.float16, dtypes.bfloat16, dtypes.float32)
"""What float8 is made from, and cast to."""


@op(differentiable=False)
def pow2scale_cast_to_fp8(t: Tensor, log2_scale: Tensor, data_type: dtype) -> TensorSpec:
    """``t * 2**log2_scale``, rounded once to the nearest float8, ties to the even code.

    Numbers beyond the type's largest (240 or 57344) become the largest, infinities too. NaN stays
    NaN.

    Shapes: t [a], 16 or 32 bits wide; log2_scale [], int32 -> [a] of data_type.
    Args:
        log2_scale: from -32 to 31; another value is a ValueError when the program runs.
        data_type: float8_143 or float8_152.
    Raises:
        DTypeError: for another data_type, another dtype of t, or a scale that is not int32.
        ShapeError: if the scale is not a scalar.
    Source: `popxl.fp8_utils` describes the formats.
    """
    name = "pow2scale_cast_to_fp8"
    if t.dtype not in WIDE:
        raise DTypeError(
            f"{name}: got t {t.spec}; expected float16, bfloat16 or float32. Cast it with ops.cast."
        )
    if data_type not in FORMATS:
        raise DTypeError(
            f"{name}: got data_type {data_type}; expected popxl.float8_143 or popxl.float8_152."
        )
    check_log2_scale(name, log2_scale)
    return TensorSpec(t.shape, data_type, t.meta_shape)


@op(differentiable=False)
def pow2scale_cast_from_fp8(t: Tensor, log2_scale: Tensor, data_type: dtype) -> TensorSpec:
    """The number of each float8 code times ``2**log2_scale``, rounded once.

    Shapes: t [a], float8; log2_scale [], int32 -> [a] of data_type.
    Args:
        log2_scale: from -32 to 31; another value is a ValueError when the program runs.
        data_type: float16, bfloat16 or float32.
    Raises:
        DTypeError: for another data_type, a t that is not float8, or a scale that is not int32.
        ShapeError: if the scale is not a scalar.
    """
    name = "pow2scale_cast_from_fp8"
    check_float8(name, t=t)
    if data_type not in WIDE:
        raise DTypeError(
            f"{name}: got data_type {data_type}; expected popxl.float16, bfloat16 or float32."
        )
    check_log2_scale(name, log2_scale)
    return TensorSpec(t.shape, data_type, t.meta_shape)


pow2scale_cast_to_fp8.cost(elementwise_cost)
pow2scale_cast_from_fp8.cost(elementwise_cost)
