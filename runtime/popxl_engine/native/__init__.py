"""Kernels in C++ for CPUs: passes over memory that PyTorch makes several of, or makes slowly.

The `.cpp` files are compiled into one library, once per machine (`library.py`), and
`kernels/native.py` says which ops use it. Where there is no compiler the plain kernels run, and the
log says so once.
"""

from popxl_engine.native.library import (
    CODES,
    adds_product,
    attends,
    call,
    elsewhere,
    is_here,
    library,
    multiplies,
    scratch,
    takes,
    takes_rows,
    updates,
)

__all__ = [
    "CODES",
    "adds_product",
    "attends",
    "call",
    "elsewhere",
    "is_here",
    "library",
    "multiplies",
    "scratch",
    "takes",
    "takes_rows",
    "updates",
]
