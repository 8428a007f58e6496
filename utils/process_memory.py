"""The host's memory that this process has."""

import os


def resident_bytes() -> int:
    """Bytes of this process that are in host memory now, what it shares with others among them."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """Most bytes of this process that have been in host memory at a time."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
