"""Scales for float8 by the error of the cast."""

from popxl_addons.ops.fp8_mse_scale.fp8_mse_scale import fp8_mse_scale
