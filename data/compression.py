"""Files that may be compressed, read as what they hold."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from data.errors import DataError
from data.records import unreadable

OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": lambda path: gzip.open(path, "rb"),
    ".bz2": lambda path: bz2.open(path, "rb"),
    ".xz": lambda path: lzma.open(path, "rb"),
}
"""How files of an ending are opened."""
EXPANDED = 4
"""Bytes of text per byte of a compressed file, roughly."""


def is_compressed(path: Path) -> bool:
    """Whether a file's name says so."""
    return path.suffix in OPENERS


def plain_suffix(path: Path) -> str:
    """The ending of a file's name, but one that says how it is compressed."""
    return path.with_suffix("").suffix if is_compressed(path) else path.suffix


@contextmanager
def open_text(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading its bytes, decompressed.

    Raises:
        DataError: it cannot be read, its compressed data are damaged or end too early, or it is
            compressed otherwise.
    """
    if path.suffix in (".zst", ".zip"):
        raise DataError(
            f"{path}: got a file of kind {path.suffix}; expected plain text or "
            f"{', '.join(OPENERS)}. Decompress it first."
        )
    try:
        with OPENERS.get(path.suffix, lambda plain: open(plain, "rb"))(path) as file:
            yield file
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise _damaged(path, error) from error
    except OSError as error:
        if error.errno is None:  # of bz2
            raise _damaged(path, error) from error
        raise unreadable(path, error) from error


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path}: got compressed data that are damaged ({error}); expected a whole {path.suffix} "
        "file. Restore it from a copy."
    )
