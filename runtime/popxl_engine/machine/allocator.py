"""The allocator that large blocks of the process's memory come from, and what becomes of freed
ones.
"""

import ctypes
import functools
import logging
import os
import platform
from typing import Any

from popxl_engine.native import build

logger = logging.getLogger("popxl")

# Parameters of mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
ADDRESSES = 4
"""Addresses for tensors, as a multiple of the machine's memory: those of freed blocks whose pages
the system has again are taken for blocks of their size at most."""
_allocators: list[ctypes.CDLL] = []
"""The allocator of tensors, once it is in use."""


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


def release_freed_memory() -> None:
    """See `popxl.extensions.release_freed_memory`. C libraries without `malloc_trim` do so by
    themselves.
    """
    if _allocators:
        _allocators[0].trim()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class TensorCounter:
    """Counts the bytes that tensors of all threads take of the processor's memory, inside a block.
    A tensor of 64 KiB and more counts with up to 64 bytes behind it.

    Raises:
        RuntimeError: tensors do not come from the allocator, so nobody can count them.
    """

    def __init__(self) -> None:
        if not _allocators:
            raise RuntimeError(
                "memory: got tensors in the C library's memory; expected the runtime's own "
                "allocator. It takes a C++ compiler and PyTorch's headers."
            )
        self._library = _allocators[0]

    def __enter__(self) -> "TensorCounter":
        self._library.count(True)
        return self

    def __exit__(self, *_: Any) -> None:
        self._library.count(False)

    def take_most(self) -> int:
        """The most bytes at a time since the last call, or the block's begin: less those from
        before the block. After it, the present ones are the most.
        """
        return int(self._library.take_most())

    def adjust(self, more: int) -> None:
        """Count more bytes from here on, or fewer: of a tensor that is now something else."""
        self._library.adjust(more)


def keep_tensors_together(waits: bool = True) -> bool:
    """Have PyTorch take large blocks of tensors, from here on, from an allocator that leaves few
    holes between them: `native/memory/allocator.cpp`.

    Returns False, and changes nothing, where there is no compiler, where PyTorch came without its
    headers or has another allocator than its own, or where the system has no addresses for it.

    Args:
        waits: for a compiler that still makes it; else that is another reason.
    """
    sources = build.allocator()
    if sources is None or not waits and build.is_being_made(sources):
        return False
    return _takes_over(sources)


@functools.cache
def _takes_over(sources: build.Sources) -> bool:
    loaded = build.load(sources)
    take_over = getattr(loaded, "take_over", None)
    if loaded is None or take_over is None:
        return False
    take_over.argtypes, take_over.restype = [ctypes.c_size_t], ctypes.c_bool
    loaded.count.argtypes, loaded.adjust.argtypes = [ctypes.c_bool], [ctypes.c_int64]
    loaded.take_most.restype = ctypes.c_int64
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not take_over(ADDRESSES * memory):
        return False
    _allocators.append(loaded)
    return True
