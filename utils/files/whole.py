"""Files and names that others never see half written, and what the disk has of them."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from popxl_gpt.utils.files.plain import create_plain


def sync(target: "Path | IO[Any]") -> None:
    """Bring what a file has, be it open or not, or a folder's list of names, onto the disk."""
    if not isinstance(target, Path):
        target.flush()
        os.fsync(target.fileno())
        return
    number = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def written_whole(path: Path, is_lasting: bool = True) -> Iterator[Path]:
    """Gives the file beside ``path`` to write to: it takes the name ``path`` at the end, or goes
    after an error. A link there goes; what it leads to stays.

    Args:
        is_lasting: bring it onto the disk before and after, so that the name has the old or the new
            content after a power failure, too. Without, for what is made again from other files,
            nobody waits for the disk.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    made = create_plain(partial)
    try:
        # the very file, whatever others, who may write to the folder too, put in its place
        yield Path(f"/proc/self/fd/{made}")
        if is_lasting:
            os.fsync(made)
        os.replace(partial, path)
        if is_lasting:
            sync(path.parent)
    finally:
        os.close(made)
        partial.unlink(missing_ok=True)


def write_whole(path: Path, content: "bytes | str", is_lasting: bool = True) -> None:
    """Write a file, see `written_whole`; text as UTF-8."""
    with written_whole(path, is_lasting) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def remove_partial(path: Path) -> None:
    """Remove what processes that were killed have left of `written_whole`. None may write to the
    file now.
    """
    for left in path.parent.glob(".*"):
        if re.fullmatch(rf"\.{re.escape(path.name)}\.\d+", left.name):
            left.unlink(missing_ok=True)


def rename(path: Path, name: str) -> Path:
    """Give a file or a folder another name in its folder. Returns its new path."""
    renamed = path.with_name(name)
    os.rename(path, renamed)
    return renamed


def set_aside(path: Path, mark: str) -> Path:
    """Give a file or a folder a name of its own that begins with a mark. Returns its new path."""
    number, name = 1, f"{mark}{path.name}"
    while path.with_name(name).exists():
        number += 1
        name = f"{mark}{path.name}-{number}"
    return rename(path, name)


def remove_folder(folder: Path, hidden: str) -> None:
    """Remove a folder, which has a hidden name while it is there in part only; what cannot be
    removed stays under that.
    """
    shutil.rmtree(rename(folder, hidden), ignore_errors=True)
    sync(folder.parent)
