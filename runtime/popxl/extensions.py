"""What goes beyond PopXL. Applications reach it through one small module that falls back to plain PopXL."""

from popxl.dtypes import bfloat16
from popxl.printer import to_text
from popxl.verify import verify

__all__ = ["bfloat16", "to_text", "verify"]
