"""Files that may be compressed, read as what they hold."""

import bz2
import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from popxl_gpt.data.errors import NoTextError
from popxl_gpt.utils.errors import DataError, unreadable

ZST_BYTES = 2**12
"""Bytes of a .zst file that are decompressed at a time: at most 128 MiB come of them."""
ZSTANDARD = "zstandard"
"""The package that reads .zst, which not every environment has."""


def optional_package(name: str, path: Path) -> Any:
    """A package that a file needs. DataError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise DataError(
            f"{path}: got a file that the package {package} reads, which is not installed; "
            f"expected it. Install it: pip install {package}."
        ) from error


class _ZstFile(io.RawIOBase):
    """What a .zst file holds, frame after frame. The package's own reader takes a file that was cut
    off for one that has ended.
    """

    def __init__(self, path: Path) -> None:
        self._package = optional_package(ZSTANDARD, path)
        self._file = open(path, "rb")
        self._begin(b"")

    def _begin(self, content: bytes) -> None:
        """Begin a frame with what is read of it."""
        self._frame = self._package.ZstdDecompressor().decompressobj()
        self._given, self._made, self._is_inside = content, b"", False

    def readable(self) -> bool:
        """Whether it can be read: always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer; returns 0 at the end."""
        while not self._made:
            content = self._given or self._file.read(ZST_BYTES)
            if not content:
                if self._is_inside:
                    raise EOFError("it ends within a frame")
                return 0
            self._given, self._is_inside = b"", True
            try:
                made = self._frame.decompress(content)
            except self._package.ZstdError as error:
                raise EOFError(str(error)) from error
            if self._frame.eof:
                self._begin(self._frame.unused_data)
            self._made = made
        count = min(len(buffer), len(self._made))
        buffer[:count], self._made = self._made[:count], self._made[count:]
        return count

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": lambda path: gzip.open(path, "rb"),
    ".bz2": lambda path: bz2.open(path, "rb"),
    ".xz": lambda path: lzma.open(path, "rb"),
    ".zst": lambda path: io.BufferedReader(_ZstFile(path)),
}
"""How files of an ending are opened."""
EXPANDED = 4
"""Bytes of text per byte of a compressed file, roughly."""


def is_compressed(path: Path) -> bool:
    """Whether a file's name says so."""
    return path.suffix in OPENERS


def plain_suffix(path: Path) -> str:
    """The ending of a file's name, in small letters, but one that says how it is compressed."""
    return (path.with_suffix("") if is_compressed(path) else path).suffix.lower()


@contextmanager
def open_text(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file for reading its bytes, decompressed.

    Raises:
        NoTextError: its compressed data are damaged or end too early, or it is compressed
            otherwise.
        DataError: it cannot be read.
    """
    if path.suffix == ".zip":
        raise NoTextError(
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


def _damaged(path: Path, error: Exception) -> NoTextError:
    return NoTextError(
        f"{path}: got compressed data that are damaged ({error}); expected a whole {path.suffix} "
        "file. Restore it from a copy."
    )
