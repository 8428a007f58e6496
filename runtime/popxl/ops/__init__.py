"""One paragraph per op, in family files. May import the core.

To add an op: declare it in its family file here, write the kernel of the same name in ``popxl_engine/kernels``, and add a
line to ``runtime/tests/samples``.
"""

import sys

from popxl.ops.arithmetic import add, add_
from popxl.ops.call import CallSiteInfo, call, call_with_info, repeat, repeat_with_info
from popxl.ops.conditional import ConditionalSiteInfo, conditional, conditional_with_info
from popxl.values import Operators

Operators.table = sys.modules[__name__]
