"""Files that others never see half written."""

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Gives the file beside ``path`` to write to: it takes the name ``path`` at the end, or goes
    after an error.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def remove_partial(path: Path) -> None:
    """Remove what processes that were killed have left of `written_whole`. None may write to the
    file now.
    """
    for left in path.parent.glob(".*"):
        if re.fullmatch(rf"\.{re.escape(path.name)}\.\d+", left.name):
            left.unlink(missing_ok=True)


def save_picture(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib as PNG; characters that its font lacks are boxes, which nobody
    needs to hear of.
    """
    with written_whole(path) as partial, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure.savefig(partial, format="png")
