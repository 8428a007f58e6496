"""Products of 8-bit floating-point numbers with scales that come from the tensors themselves.
Programs call these ops by `popxl.extensions`.

The types are float8_e4m3fn (4 bits of exponent, 3 of mantissa, up to 448, no infinity), for values
and weights, and float8_e5m2 (5 and 2 bits, up to 57344), for gradients. A tensor has one scale: the
largest power of two with which its largest element still lies within the type. A power of two
changes no bit of a mantissa, and one scale for a tensor serves its transpose, too, which the
product of a weight's gradient takes. `popxl_addons.ops.float8` has the gradients.

Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv:2209.05433.
"""

from popxl import dtypes
from popxl.dtypes import dtype
from popxl.errors import DTypeError, ShapeError
from popxl.opdef import Cost, op
from popxl.ops.casting import WIDE
from popxl.ops.checks import elementwise_cost
from popxl.tensor import Tensor, TensorSpec

NARROW = (dtypes.float8_e4m3fn, dtypes.float8_e5m2)
"""The types that these ops make and multiply."""


def _check_wide(name: str, t: Tensor) -> None:
    if t.dtype not in WIDE:
        raise DTypeError(
            f"{name}: got t {t.spec}; expected float16, bfloat16 or float32. Cast it with ops.cast."
        )


def _check_amax(name: str, **amaxes: Tensor) -> None:
    for parameter, t in amaxes.items():
        if t.dtype is not dtypes.float32 or t.shape:
            raise DTypeError(
                f"{name}: got {parameter} {t.spec}; expected a float32 scalar. Make it with amax."
            )


@op(differentiable=False, names="{t}_amax")
def amax(t: Tensor) -> TensorSpec:
    """The largest magnitude of a tensor's elements; NaN if one is NaN, 0 where there is none.

    Shapes: t [a], 16 or 32 bits wide -> [], float32.
    Raises:
        DTypeError: for another dtype of t.
    """
    _check_wide("amax", t)
    return TensorSpec((), dtypes.float32)


amax.cost(elementwise_cost)


@op(differentiable=False, names="{t}_{data_type.name}")
def to_float8(t: Tensor, amax: Tensor, data_type: dtype) -> TensorSpec:
    """``t * 2**s``, rounded once to the nearest float8, ties to the even code, where s is the
    largest exponent from -63 to 63 with which ``amax * 2**s`` is no more than the type's largest.
    All elements are NaN where amax is not finite.

    Shapes: t [a], 16 or 32 bits wide; amax [], float32 -> [a] of data_type.
    Args:
        amax: the largest magnitude of t and of what else is to have its scale. What an element
            becomes that is larger is not defined.
        data_type: float8_e4m3fn or float8_e5m2.
    Raises:
        DTypeError: for another data_type or dtype of t, or an amax that is no float32 scalar.
    """
    _check_wide("to_float8", t)
    _check_amax("to_float8", amax=amax)
    if data_type not in NARROW:
        raise DTypeError(
            f"to_float8: got data_type {data_type}; expected float8_e4m3fn or float8_e5m2."
        )
    return TensorSpec(t.shape, data_type, t.meta_shape)


to_float8.cost(elementwise_cost)


@op(differentiable=False)
def float8_matmul(
    lhs: Tensor,
    rhs: Tensor,
    lhs_amax: Tensor,
    rhs_amax: Tensor,
    output_type: dtype,
) -> TensorSpec:
    """The matrix product of the numbers that two tensors of `to_float8` stand for, accumulated in
    float32 and rounded once.

    No device multiplies float8_e5m2 by itself.

    Shapes: lhs [m, k] and rhs [k, n], float8; lhs_amax and rhs_amax [], float32, as `to_float8` got
        them -> [m, n] of output_type.
    Args:
        output_type: float16, bfloat16 or float32.
    Raises:
        ShapeError: if these are no matrices, or the inner axes differ.
        DTypeError: for another output_type, operands of other types, or both of float8_e5m2.
    """
    given = f"float8_matmul: got lhs {lhs.spec} and rhs {rhs.spec}"
    if lhs.dtype not in NARROW or rhs.dtype not in NARROW:
        raise DTypeError(
            f"{given}; expected float8_e4m3fn or float8_e5m2. Make them with to_float8."
        )
    if lhs.dtype is rhs.dtype is dtypes.float8_e5m2:
        raise DTypeError(f"{given}; expected one of them to be float8_e4m3fn.")
    if (lhs.rank, rhs.rank) != (2, 2) or lhs.shape[1] != rhs.shape[0]:
        raise ShapeError(f"{given}; expected [m, k] and [k, n]. Reshape or transpose one.")
    _check_amax("float8_matmul", lhs_amax=lhs_amax, rhs_amax=rhs_amax)
    if output_type not in WIDE:
        raise DTypeError(
            f"float8_matmul: got output_type {output_type}; expected float16, bfloat16 or float32."
        )
    return TensorSpec((lhs.shape[0], rhs.shape[1]), output_type)


@float8_matmul.cost
def float8_matmul_cost(y: Tensor, lhs: Tensor, rhs: Tensor, *options: object) -> Cost:
    """A product and a sum for each term of each element."""
    return Cost(flops=2 * y.nelms * lhs.shape[1])
