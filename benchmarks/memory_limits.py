"""Holding a process to some memory, and counting what it takes: its resident set, and its files'
pages in the cache.
"""

import ctypes
import mmap
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

CGROUPS = Path("/sys/fs/cgroup")
PROCESS = Path("/proc/self")


@dataclass(frozen=True)
class Version:
    """The files of one version of memory cgroups."""

    limit: str
    swap: str
    """Limits swap, or memory and swap together; not on every system."""
    peak: str
    """Most bytes so far, page cache included; not on every system."""


V1 = Version("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max_usage_in_bytes")
V2 = Version("memory.max", "memory.swap.max", "memory.peak")


@dataclass(frozen=True)
class Cgroup:
    """A memory cgroup below this process's own."""

    folder: Path
    version: Version

    @property
    def peak_bytes(self) -> int | None:
        """Most that its processes took at a time, page cache included; None where the kernel does
        not say.
        """
        try:
            return int((self.folder / self.version.peak).read_text())
        except (OSError, ValueError):
            return None


def join_cgroup(
    name: str, limit: int, kind: str = "auto", root: Path = CGROUPS, process: Path = PROCESS
) -> Cgroup | None:
    """Hold this process, and what it starts, to some bytes of memory, page cache included.

    Args:
        kind: "auto" for a cgroup of version 2; "v1" for one of version 1, which knows no rule for
            who may make one where, so that it is not made unasked; "none" for none.
    Returns:
        None where the system has no such cgroups, or does not let us; nothing is left then.
    """
    place = _place(kind, root, process)
    if place is None:
        return None
    parent, version = place
    folder = parent / name
    try:
        folder.mkdir()
    except OSError:
        return None
    try:
        _write(folder / version.limit, limit)
        if (folder / version.swap).exists():
            _write(folder / version.swap, limit if version is V1 else 0)
        _write(folder / "cgroup.procs", os.getpid())
    except OSError:
        remove_cgroup(name, kind, root, process)
        return None
    return Cgroup(folder, version)


def remove_cgroup(
    name: str, kind: str = "auto", root: Path = CGROUPS, process: Path = PROCESS
) -> None:
    """Remove what `join_cgroup` made, when its processes have ended; no error where there is
    nothing.
    """
    place = _place(kind, root, process)
    if place is not None:
        with suppress(OSError):
            (place[0] / name).rmdir()


def _place(kind: str, root: Path, process: Path) -> tuple[Path, Version] | None:
    """Where new cgroups belong."""
    if kind == "auto":
        return _place_v2(root, process)
    return _place_v1(root, process) if kind == "v1" else None


def _write(file: Path, value: "int | str") -> None:
    """Set a file that is there: the kernel makes those of a cgroup."""
    with open(os.open(file, os.O_WRONLY), "w") as opened:
        opened.write(str(value))


def _place_v2(root: Path, process: Path) -> tuple[Path, Version] | None:
    """The process's own cgroup, if those below it may have memory limits."""
    parent = _own(root, process, "")
    if parent is None or "memory" not in _words(parent / "cgroup.controllers"):
        return None
    if "memory" not in _words(parent / "cgroup.subtree_control"):
        # not where the parent holds processes itself, nor where it is another user's
        with suppress(OSError):
            _write(parent / "cgroup.subtree_control", "+memory")
    return parent, V2


def _place_v1(root: Path, process: Path) -> tuple[Path, Version] | None:
    """The process's own cgroup, if what is below it counts as its own too: a limit may only take
    away.
    """
    parent = _own(root / "memory", process, "memory")
    if parent is None or _words(parent / "memory.use_hierarchy") != ["1"]:
        return None
    return parent, V1


def _own(root: Path, process: Path, controller: str) -> Path | None:
    """The folder of the process's cgroup; in a container that is the root, whatever its path
    says.
    """
    try:
        lines = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
    except OSError:
        return None
    path = next(
        (path for _, controllers, path in lines if controller in controllers.split(",")), None
    )
    folders = () if path is None else (root / path.lstrip("/"), root)
    return next((folder for folder in folders if (folder / "cgroup.procs").exists()), None)


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def cached_bytes(folder: Path, process: Path = PROCESS) -> int:
    """Bytes of this process's open files of a folder that the system keeps in its page cache."""
    libc, found = ctypes.CDLL(None, use_errno=True), 0
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    for entry in list((process / "fd").iterdir()):
        number, size = int(entry.name), 0
        with suppress(OSError):  # closed meanwhile
            if Path(os.readlink(entry)).is_relative_to(folder.resolve()) and stat.S_ISREG(
                os.fstat(number).st_mode
            ):
                size = os.fstat(number).st_size
        if not size:
            continue
        with mmap.mmap(number, size) as mapped:
            pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
            if libc.mincore(
                ctypes.addressof(ctypes.c_char.from_buffer(mapped)), size, pages.ctypes.data
            ):
                raise OSError(ctypes.get_errno(), "mincore")
            found += mmap.PAGESIZE * int((pages & 1).sum())
    return found
