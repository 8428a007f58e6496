"""How the process's allocator treats large blocks."""

import ctypes
import functools
import logging
import platform

logger = logging.getLogger("popxl")

# Parameters of mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


@functools.cache
def keep_freed_memory() -> bool:
    """Tell glibc, once, to reuse large freed blocks instead of handing them back to the system: for
    the time of runs.

    A training step frees and allocates the same sizes over and over; by default each large block is
    mapped and unmapped, and its pages are cleared by the kernel every time. What was freed before
    is handed back, once: holes that are too small for a step's blocks. Returns False, and changes
    nothing, where the C library is not glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        logger.debug("allocator: not glibc, left as it is")
        return False
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    return bool(libc.mallopt(M_MMAP_MAX, 0)) and bool(libc.mallopt(M_TRIM_THRESHOLD, -1))
