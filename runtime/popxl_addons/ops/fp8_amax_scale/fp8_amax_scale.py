"""Scales for float8 by the largest element."""

import popxl
from popxl import Tensor, dtypes, fp8_utils, ops

HIGHEST = fp8_utils.MOST_SCALE


def fp8_amax_scale(src: Tensor, dtype: popxl.dtype = popxl.float8_143) -> Tensor:
    """The largest log2 scale with which no element of ``src`` overflows in a float8 type, clipped
    to -31 .. 31.

    Shapes: src [a], float16, bfloat16 or float32 -> [], int32. 31 where all elements are zero, 0
        where one is NaN.
    Args:
        dtype: float8_143 or float8_152.
    Raises:
        RuntimeError: for another dtype, or another dtype of src.
    """
    largest = largest_of("fp8_amax_scale", src, dtype)
    amax = ops.max(ops.abs(as_float32(src)))
    log2_scale = ops.floor(ops.log2(popxl.constant(largest, dtypes.float32) / amax))
    known = ops.where(ops.isnan(log2_scale), popxl.constant(0.0, dtypes.float32), log2_scale)
    return ops.cast(ops.clip(known, -HIGHEST, HIGHEST), dtypes.int32)


def largest_of(name: str, src: Tensor, dtype: popxl.dtype) -> float:
    """The largest number of a float8 type. RuntimeError for another type, or a ``src`` that no cast
    takes.
    """
    if dtype not in (dtypes.float8_143, dtypes.float8_152):
        raise RuntimeError(
            f"{name}: got dtype {dtype}; expected popxl.float8_143 or popxl.float8_152."
        )
    if src.dtype not in (dtypes.float16, dtypes.bfloat16, dtypes.float32):
        raise RuntimeError(
            f"{name}: got src {src.spec}; expected float16, bfloat16 or float32. Cast it with "
            "ops.cast."
        )
    return fp8_utils.largest(dtype)


def as_float32(t: Tensor) -> Tensor:
    """``t`` in float32."""
    return t if t.dtype is dtypes.float32 else ops.cast(t, dtypes.float32)
