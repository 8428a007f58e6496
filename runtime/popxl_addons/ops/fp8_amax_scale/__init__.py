"""Scales for float8 by the largest element."""

from popxl_addons.ops.fp8_amax_scale.fp8_amax_scale import fp8_amax_scale
