"""Scales for float8 by the error of the cast."""

import popxl
from popxl import Tensor, dtypes, ops

from popxl_addons.ops.fp8_amax_scale.fp8_amax_scale import (
    HIGHEST,
    as_float32,
    fp8_amax_scale,
    largest_of,
)


def fp8_mse_scale(src: Tensor, dtype: popxl.dtype = popxl.float8_143) -> Tensor:
    """The log2 scale, from -31 to 31, with the least mean squared error of casting ``src`` to
    float8 and back.

    It is `fp8_amax_scale`, or one more, where the largest elements are clipped for the sake of the
    others: `popxl.fp8_utils.host_fp8_mse_scale` says why no other scale is better. Of two equally
    good ones the smaller.

    Shapes: src [a], float16, bfloat16 or float32 -> [], int32.
    Args:
        dtype: float8_143 or float8_152.
    Raises:
        RuntimeError: for another dtype, or another dtype of src.
    """
    largest_of("fp8_mse_scale", src, dtype)
    fitting = fp8_amax_scale(src, dtype)
    clipping = ops.clip(fitting + 1, -HIGHEST, HIGHEST)
    is_better = ops.greater(
        _squared_error(src, dtype, fitting), _squared_error(src, dtype, clipping)
    )
    return ops.where(is_better, clipping, fitting)


def _squared_error(src: Tensor, dtype: popxl.dtype, log2_scale: Tensor) -> Tensor:
    narrow = ops.pow2scale_cast_to_fp8(src, log2_scale, dtype)
    back = ops.pow2scale_cast_from_fp8(narrow, -log2_scale, dtypes.float32)
    return ops.sumsquare(back - as_float32(src))
