"""Text files, cut into documents."""

import io
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from popxl_gpt.data.compression import open_text
from popxl_gpt.data.errors import NoTextError
from popxl_gpt.data.left_out import LeftOut

HEAD = 2**12
"""Bytes of a text that have no zero among them."""


def read_text(path: Path, documents: str, limit: int, left_out: LeftOut) -> Iterator[str]:
    """Yield the documents of a text file; of one that is left out none is given."""
    cut = {"file": whole, "paragraph": _paragraphs, "line": _lines}[documents]
    if left_out.skips:
        deque(_pieces(path, whole, 2**20, LeftOut()), maxlen=0)
    yield from _pieces(path, cut, limit, left_out)


def _pieces(
    path: Path, cut: Callable[[TextIO, int], Iterator[str]], limit: int, left_out: LeftOut
) -> Iterator[str]:
    with open_utf8(path) as file:
        try:
            yield from cut(file, limit)
        finally:
            if file.newlines not in (None, "\n"):
                left_out.line_ends[str(path)] = None


@contextmanager
def open_utf8(path: Path, newline: str | None = None) -> Iterator[io.TextIOWrapper]:
    """Open a file of text, decompressed; `newline` as of `open`.

    Raises:
        NoTextError: it is not UTF-8, or as of `open_text`.
        DataError: it cannot be read.
    """
    try:
        with (
            open_text(path) as binary,
            io.TextIOWrapper(binary, "utf-8-sig", newline=newline) as file,
        ):
            check_head(path, binary)
            yield file
    except UnicodeDecodeError as error:
        raise _no_text(path, error.reason) from error


def check_head(path: Path, file: io.BufferedReader) -> None:
    """Refuse a file that begins as none of text does."""
    if b"\0" in file.peek(HEAD)[:HEAD]:
        raise _no_text(path, "zeros among the first ones, as of a tar or of UTF-16")


def _no_text(path: Path, reason: str) -> NoTextError:
    """The error for a file that is not UTF-8."""
    return NoTextError(
        f"{path}: got bytes that are not UTF-8 ({reason}); expected a UTF-8 text file. Convert it "
        "(iconv), or leave it out: --skip_damaged, or a glob such as 'folder/**/*.txt'."
    )


def whole(file: TextIO, limit: int) -> Iterator[str]:
    """Yield a text, cut at the end of the line that reaches so many characters."""
    while piece := file.read(limit):
        if len(piece) == limit and not piece.endswith("\n"):
            piece += file.readline(limit)
        yield piece


def _lines(file: TextIO, limit: int) -> Iterator[str]:
    while line := file.readline(limit):
        yield line.rstrip("\n")


def _paragraphs(file: TextIO, limit: int) -> Iterator[str]:
    """Paragraphs with the empty lines that follow them: together they are the text."""
    paragraph: list[str] = []
    size, has_text, is_ended = 0, False, False
    while line := file.readline(limit):
        is_empty = not line.strip()
        if size >= limit or is_ended and not is_empty:
            yield "".join(paragraph)
            paragraph, size, has_text, is_ended = [], 0, False, False
        paragraph.append(line)
        size += len(line)
        has_text |= not is_empty
        is_ended |= is_empty and has_text
    yield "".join(paragraph)
