"""The files of cgroups, as the kernel shows them to one process."""

from collections.abc import Mapping
from pathlib import Path


def system(folder: Path, own: str, mounts: str, files: "Mapping[str, object]") -> Path:
    """A folder with a system's files.

    Args:
        own: the cgroups of the process.
        mounts: where cgroups are mounted.
        files: text of others by their names.
    """
    tree = {"proc/self/cgroup": own, "proc/self/mountinfo": mounts, **files}
    for name, text in tree.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}".rstrip("\n") + "\n")
    return folder
