"""The program: a main graph, any number of callable graphs, and how many replicas run it."""

from popxl.program import Ir, IrInternals

__all__ = ["Ir", "IrInternals"]
