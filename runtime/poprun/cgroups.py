"""The control groups that this process is in, of version 1 or 2, or of both: where containers,
Slurm and systemd write how much a process may use. A limit holds for all that is below it.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

SYSTEM = Path("/")


def cgroups(controller: str, root: Path = SYSTEM) -> Iterator[tuple[Path, int]]:
    """Folders of this process's groups and their version, 1 or 2, each before those above it, as
    far as they are mounted here.

    Args:
        controller: what the groups limit, such as "memory".
        root: folder with the system's `proc` and `sys`.
    """
    paths = {}
    for line in lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[2] = path
        elif controller in controllers.split(","):
            paths[1] = path
    for version, mounted, point in _mounts(controller, root):
        if version not in paths:
            continue
        folder = root / point.lstrip("/")
        inside = _below(paths[version], mounted)
        for part in (inside, *inside.parents):
            yield folder / part, version


def _mounts(controller: str, root: Path) -> Iterator[tuple[int, str, str]]:
    """The places where such groups are mounted: of which version, which of them is at a mount's
    top, and the mount's place.
    """
    for line in lines(root / "proc/self/mountinfo"):
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.partition(" ")
        version = {"cgroup": 1, "cgroup2": 2}.get(kind)
        controllers = options.rpartition(" ")[2].split(",")
        if version == 2 or (version == 1 and controller in controllers):
            mounted, point = (unescaped(word) for word in fields.split(" ")[3:5])
            yield version, mounted, point


def _below(path: str, mounted: str) -> PurePosixPath:
    """A group's place below the one that a mount shows; the mount's own where it lies outside, as
    in containers.
    """
    inside = PurePosixPath(path)
    if ".." in inside.parts or not inside.is_relative_to(mounted):
        return PurePosixPath()
    return inside.relative_to(mounted)


def lines(file: Path) -> list[str]:
    """The lines of a file that are not empty; none where the system does not show it."""
    try:
        text = file.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    return [line for line in text.split("\n") if line]  # names may have other ends of lines


def unescaped(word: str) -> str:
    """A path of `mountinfo`, where blanks are written as \\040."""
    return (
        word.encode(errors="surrogateescape")
        .decode("unicode_escape")
        .encode("latin-1")
        .decode(errors="surrogateescape")
    )
