"""The host's memory that this process has, and has no use for."""

import ctypes
import os


def resident_bytes() -> int:
    """Bytes of this process that are in host memory now, what it shares with others among them."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """Most bytes of this process that have been in host memory at a time."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))


def release_freed_memory() -> None:
    """Hand what was freed back to the system. The engine's allocator keeps it for the next step,
    whose sizes are the same; another program's are not, and would come on top.

    Other C libraries than glibc do so by themselves.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
