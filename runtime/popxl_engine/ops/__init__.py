"""The engine's own ops, which passes put in place of several of a program's. May import `popxl`
and `ir`.

Each is one paragraph, as `popxl.ops`' are: signature, shapes, inference of its results, cost, what
it writes. Its kernel has the same name and parameters, in `popxl_engine.kernels`. Names begin with
``fused_``, so that none is that of an op which programs use. To add one: a function under
`definition.fused_op` in its family's file.
"""

from popxl_engine.ops import accumulate, adamw, attention, cross_entropy, gemm, views
from popxl_engine.ops.definition import FUSED_OPS

__all__ = ["FUSED_OPS", "accumulate", "adamw", "attention", "cross_entropy", "gemm", "views"]
