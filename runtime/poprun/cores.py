"""How many cores a process may keep busy: those that it is bound to, or what its cgroups' quotas of
processor time leave of them, as in a container that `docker run --cpus 2` starts.

Threads beyond a quota make nothing faster: when they have used it up, the system stops all of them
until its next period, and what waits for one of them waits for that.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from poprun.cgroups import SYSTEM, cgroups, lines


def usable_cores(process: int = 0) -> int:
    """Cores for a process that shares this one's quotas.

    Args:
        process: whose binding counts, by its number; 0: this one's.
    """
    return min([bound_cores(process), *quotas()])


def bound_cores(process: int = 0) -> int:
    """Cores that a process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(process))
    return os.cpu_count() or 1


def quotas(root: Path = SYSTEM) -> Iterator[int]:
    """The cores that each quota is worth; a part of one counts as one.

    Args:
        root: folder with the system's `proc` and `sys`.
    """
    for folder, version in cgroups("cpu", root):
        if version == 2:  # "150000 100000", or "max 100000"
            words = " ".join(lines(folder / "cpu.max")).split()
        else:  # -1: there is none
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [line for name in names for line in lines(folder / name)]
        if len(words) == 2 and all(word.isdigit() for word in words):
            quota, period = map(int, words)
            yield max(1, math.ceil(quota / period))
