"""Scales for float8, and conversions on the host, under one name."""

from popxl.fp8_utils import (
    host_fp8_mse_scale,
    host_pow2scale_cast_from_fp8,
    host_pow2scale_cast_to_fp8,
)

from popxl_addons.ops.fp8_amax_scale import fp8_amax_scale
from popxl_addons.ops.fp8_mse_scale import fp8_mse_scale

__all__ = [
    "fp8_amax_scale",
    "fp8_mse_scale",
    "host_fp8_mse_scale",
    "host_pow2scale_cast_from_fp8",
    "host_pow2scale_cast_to_fp8",
]
