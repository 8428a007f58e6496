"""What goes beyond PopXL. Applications reach it through one small module that falls back to plain PopXL."""

from popxl.dtypes import bfloat16

__all__ = ["bfloat16"]
