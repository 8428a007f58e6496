"""Files that others never see half written."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from popxl_gpt.utils.files.plain import create_plain, sync


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


def remove_partial(path: Path) -> None:
    """Remove what processes that were killed have left of `written_whole`. None may write to the
    file now.
    """
    for left in path.parent.glob(".*"):
        if re.fullmatch(rf"\.{re.escape(path.name)}\.\d+", left.name):
            left.unlink(missing_ok=True)
