"""JSON lines: one JSON object a line, of which one field is the text."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from popxl_gpt.config.texts import shown_text
from popxl_gpt.data.compression import open_text, plain_suffix
from popxl_gpt.data.errors import DataError

SUFFIXES = (".jsonl", ".ndjson")
Kind = TypeVar("Kind")
LONGEST_LINE = 2**30
"""Bytes of a line."""


def is_json_lines(path: Path) -> bool:
    """Whether a file's name says so, compressed or not."""
    return plain_suffix(path) in SUFFIXES


def read_json_lines(
    path: Path, field: str, damaged: dict[tuple[str, int], str] | None = None
) -> Iterator[str]:
    """Yield the texts of a file's objects; empty lines count for nothing.

    Args:
        field: of each object, the text.
        damaged: as of `json_objects`.
    Raises:
        DataError: a line is no JSON object with a text in that field, or the file cannot be read.
    """

    def text(found: dict[str, Any]) -> str:
        if not isinstance(found.get(field), str):
            if field in found:
                kind = type(found[field]).__name__
                raise ValueError(f"got a value of type {kind} in '{field}', which is no text")
            names = ", ".join(found) or "none"
            raise ValueError(f"got no text in '{field}' (fields: {shown_text(names)})")
        return whole_characters(found[field])

    expected = (
        f"a JSON object with text in '{field}'. Correct the line, name another --text_field, or "
        "leave such lines out with --skip_damaged. Prompts with answers are for `prepare.py "
        "conversations`"
    )
    yield from json_objects(path, text, expected, damaged)


def json_objects(
    path: Path,
    read: Callable[[dict[str, Any]], Kind],
    expected: str,
    damaged: dict[tuple[str, int], str] | None = None,
) -> Iterator[Kind]:
    """Yield what a function makes of each of a file's JSON objects; empty lines count for nothing.

    Args:
        read: raises ValueError with what is wrong where it makes nothing of an object.
        expected: what errors say of it, and how to get there.
        damaged: takes a note for each line that is left out, by file and byte of the decompressed
            text; None: such a line is an error.
    Raises:
        DataError: a line holds something else, or the file cannot be read.
    """
    start = number = 0
    with open_text(path) as file:
        while line := file.readline(LONGEST_LINE):
            number += 1
            try:
                if line.strip():
                    yield read(_object(line))
            except ValueError as error:
                if damaged is None:
                    raise DataError(
                        f"{path}, line {number} at byte {start}: {error}; expected {expected}."
                    ) from error
                damaged[str(path), start] = str(error)
            start += len(line)


def _object(line: bytes) -> dict[str, Any]:
    """The JSON object of a line. ValueError says what it is instead."""
    try:
        found = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        shown = shown_text(line.decode("utf-8", "backslashreplace"))
        raise ValueError(f"got {shown}") from error
    if not isinstance(found, dict):
        raise ValueError(f"got {shown_text(json.dumps(found))}")
    return found


def whole_characters(text: str) -> str:
    """A text that has a form in UTF-8; ValueError where it has none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("got text with half of a surrogate pair") from error
    return text
