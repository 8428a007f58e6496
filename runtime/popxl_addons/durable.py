"""Folders that are either the old or the new one, whatever happens while they are written."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Callable


def sync_file(path: Path) -> None:
    """Flush a file's, or a folder's, contents to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Put what ``write(folder)`` makes at ``target``: written beside it, flushed, renamed; what was there goes last.

    If ``write`` fails the target is as it was and nothing is left beside it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        write(scratch / "new")
        for folder, _, _ in os.walk(scratch / "new"):
            sync_file(Path(folder))
        if target.exists():
            os.rename(target, scratch / "old")
        try:
            os.rename(scratch / "new", target)
        except OSError:
            if (scratch / "old").exists():
                os.rename(scratch / "old", target)
            raise
        sync_file(target.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
