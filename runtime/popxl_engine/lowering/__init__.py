"""The way from graphs to one block: calls are inlined, loops and branches become bodies."""

from popxl_engine.lowering.inlining import lower

__all__ = ["lower"]
