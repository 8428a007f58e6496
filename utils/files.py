"""Files that others never see half written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Gives the file beside ``path`` to write to: it takes the name ``path`` at the end, or goes after an error."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
