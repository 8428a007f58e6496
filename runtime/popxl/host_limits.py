"""How much of the host's memory this process may use: the machine's, or what its memory cgroups
leave of it. Swap is not counted: rows that are page-locked, and rows that every step uses, have no
place there.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from poprun.cgroups import SYSTEM, cgroups, lines


@dataclass(frozen=True)
class HostMemory:
    """Bytes of the host's memory for this process and all that shares it."""

    total: int
    """The machine's memory, or the smallest limit."""
    available: int
    """What is left of the machine's memory and of every limit; pages of files, which the system may
    drop, are left.
    """
    limited_by: str
    """The file with the smallest limit, or "this machine"."""


@dataclass(frozen=True)
class Version:
    """The files of one version of memory cgroups."""

    limits: tuple[str, ...]
    usage: str
    droppable: tuple[str, ...]
    """Pages of files in `memory.stat`, which a cgroup gives up before it is short of memory."""


VERSIONS = {
    1: Version(
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
    2: Version(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")),
}


def host_memory(root: Path = SYSTEM) -> HostMemory:
    """What this process may use of the host's memory.

    Args:
        root: folder with the system's `proc` and `sys`.
    """
    sizes = _numbers(root / "proc/meminfo")
    machine = sizes.get("MemTotal:", 0) * 1024 or os.sysconf("SC_PHYS_PAGES") * os.sysconf(
        "SC_PAGE_SIZE"
    )
    total, limited_by = machine, "this machine"
    available = sizes["MemAvailable:"] * 1024 if "MemAvailable:" in sizes else machine
    for folder, number in cgroups("memory", root):
        version = VERSIONS[number]
        stat = _numbers(folder / "memory.stat")
        in_use = (_number(folder / version.usage) or 0) - sum(
            stat.get(name, 0) for name in version.droppable
        )
        limits = {name: _number(folder / name) for name in version.limits}
        limits["memory.stat"] = stat.get("hierarchical_memory_limit")
        for name, limit in limits.items():
            if limit is None:
                continue
            available = min(available, max(0, limit - max(0, in_use)))
            # the same limit higher up is where it was set: `memory.stat` only repeats it
            if limit < total or (limit == total and limited_by.endswith("memory.stat")):
                total, limited_by = limit, f"/{(folder / name).relative_to(root)}"
    return HostMemory(total, min(available, total), limited_by)


def _number(file: Path) -> int | None:
    """A file with one number; None where there is no such file, or something else, as "max", in
    it.
    """
    found = lines(file)
    return int(found[0]) if found and found[0].strip().isdigit() else None


def _numbers(file: Path) -> dict[str, int]:
    """The first two words of lines, a name and a number."""
    words = (line.split()[:2] for line in lines(file))
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdigit()}
