"""Conversion between element types."""

from typing import Optional

from popxl import dtypes
from popxl.dtypes import dtype
from popxl.errors import DTypeError
from popxl.opdef import Cost, op
from popxl.values import Tensor, TensorSpec


@op(host=lambda t, data_type: t.astype(data_type.as_numpy()))
def cast(t: Tensor, data_type: dtype) -> TensorSpec:
    """Convert the element type: floating point to the nearest, or truncated towards zero if the target is an integer.

    Shapes: t [a], any dtype but float8 -> [a] of data_type.
    Raises:
        DTypeError: for a float8 type on either side; pow2scale_cast_to_fp8 and pow2scale_cast_from_fp8 convert those.
    """
    for what, given in (("t", t.dtype), ("data_type", data_type)):
        if given in (dtypes.float8_143, dtypes.float8_152):
            raise DTypeError(
                f"cast: got {what} {given.name}; expected a type of 16 bits or more. Use the pow2scale_cast ops for "
                f"float8."
            )
    return TensorSpec(t.shape, data_type, t.meta_shape)


@cast.vjp
def cast_vjp(dy: Tensor, y: Tensor, t: Tensor, data_type: dtype) -> Optional[Tensor]:
    """Cast back; integers have no gradient."""
    if not (t.dtype.is_floating_point and data_type.is_floating_point):
        return None
    return cast(dy, t.dtype)


@cast.cost
def cast_cost(y: Tensor, t: Tensor, data_type: dtype) -> Cost:
    """Moves data only."""
    return Cost()


def cast_if_needed(t: Tensor, data_type: dtype) -> Tensor:
    """`cast`, or ``t`` itself if it is of that dtype already."""
    return t if t.dtype is data_type else cast(t, data_type)
