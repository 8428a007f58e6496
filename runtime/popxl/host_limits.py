"""How much of the host's memory this process may use: the machine's, or what its memory cgroups
leave of it.

Containers, Slurm and systemd hold processes in cgroups, of version 1 or 2, or of both; a limit
holds for all that is below it. Swap is not counted: rows that are page-locked, and rows that every
step uses, have no place there.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

SYSTEM = Path("/")


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


V1 = Version(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
V2 = Version(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))


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
    for folder, version in cgroups(root):
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


def cgroups(root: Path = SYSTEM) -> Iterator[tuple[Path, Version]]:
    """Folders of this process's memory cgroups, each before those above it, as far as they are
    mounted here.
    """
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[V2] = path
        elif "memory" in controllers.split(","):
            paths[V1] = path
    for version, mounted, point in _mounts(root):
        if version not in paths:
            continue
        folder = root / point.lstrip("/")
        inside = _below(paths[version], mounted)
        for part in (inside, *inside.parents):
            yield folder / part, version


def _mounts(root: Path) -> Iterator[tuple[Version, str, str]]:
    """The places where memory cgroups are mounted: of which version, which of them is at a mount's
    top, and the mount's place.
    """
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.partition(" ")
        mounted, point = (unescaped(word) for word in fields.split()[3:5])
        if kind == "cgroup2":
            yield V2, mounted, point
        elif kind == "cgroup" and "memory" in options.rpartition(" ")[2].split(","):
            yield V1, mounted, point


def _below(path: str, mounted: str) -> PurePosixPath:
    """A cgroup's place below the one that a mount shows; the mount's own where it lies outside, as
    in containers.
    """
    inside = PurePosixPath(path)
    if ".." in inside.parts or not inside.is_relative_to(mounted):
        return PurePosixPath()
    return inside.relative_to(mounted)


def _number(file: Path) -> int | None:
    """A file with one number; None where there is no such file, or something else, as "max", in
    it.
    """
    lines = _lines(file)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _numbers(file: Path) -> dict[str, int]:
    """The first two words of lines, a name and a number."""
    words = (line.split()[:2] for line in _lines(file))
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdigit()}


def _lines(file: Path) -> list[str]:
    """None where the system does not show the file."""
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def unescaped(word: str) -> str:
    """A path of `mountinfo`, where blanks are written as \\040."""
    return (
        word.encode(errors="surrogateescape")
        .decode("unicode_escape")
        .encode("latin-1")
        .decode(errors="surrogateescape")
    )
