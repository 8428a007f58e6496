"""Folders that are either the old or the new one, whatever happens while they are written."""

import ctypes
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Linux: paths relative to the working directory; swap the two names (renameat2(2))."""


def sync_file(path: Path) -> None:
    """Flush a file's, or a folder's, contents to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Put what ``write(folder)`` makes at ``target``: written beside it, flushed, swapped in; the
    old one goes last.

    If ``write`` fails the target is as it was. What a killed process left beside it is removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    mark = f".{target.name}.saving-"
    scratch = Path(tempfile.mkdtemp(prefix=mark, dir=target.parent))
    try:
        new = scratch / "new"
        write(new)
        for folder, _, _ in os.walk(new):
            sync_file(Path(folder))
        if not target.exists():
            os.rename(new, target)
        elif not exchange(new, target):
            _rename_twice(new, target, scratch / "old")
        sync_file(target.parent)
        for left in target.parent.glob(f"{mark}*"):
            shutil.rmtree(left, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step. False where the system or the file system cannot: nothing has
    changed then.
    """
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    done: int = renameat2(
        AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE
    )
    return done == 0


def _rename_twice(new: Path, target: Path, old: Path) -> None:
    os.rename(target, old)
    try:
        os.rename(new, target)
    except OSError:
        os.rename(old, target)
        raise
