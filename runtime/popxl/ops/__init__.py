"""One paragraph per op, in family files. May import the core.

To add an op: declare it in its family file here, write the kernel of the same name in ``popxl_engine/kernels``, and add a
line to ``runtime/tests/samples``.
"""

import sys

from popxl.ops.arithmetic import (
    abs, add, add_, clip, div, fmod, increment_mod, increment_mod_, maximum, mul, negate, pow, scaled_add, scaled_add_, sign, sub,
)  # fmt: skip
from popxl.ops.call import CallSiteInfo, call, call_with_info, repeat, repeat_with_info
from popxl.ops.casting import cast
from popxl.ops.comparison import equal, greater, isfinite, isinf, isnan, logical_and, logical_not, logical_or
from popxl.ops.conditional import ConditionalSiteInfo, conditional, conditional_with_info
from popxl.ops.elementwise import (
    ceil, cos, exp, exp_, floor, gelu, gelu_, geluerf, geluerf_, log, log2, relu, relu_, sin, sqrt, swish, swish_, tanh,
)  # fmt: skip
from popxl.values import Operators

clamp = clip

Operators.table = sys.modules[__name__]
