"""JSON lines: one JSON object a line, of which one field is the text."""

import json
from collections.abc import Iterator
from pathlib import Path

from config.texts import shown_text
from data.compression import open_text, plain_suffix
from data.errors import DataError

SUFFIXES = (".jsonl", ".ndjson")
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
        damaged: takes a note for each line that is left out, by file and byte of the decompressed
            text; None: such a line is an error.
    Raises:
        DataError: a line is no JSON object with a text in that field, or the file cannot be read.
    """
    start = number = 0
    with open_text(path) as file:
        while line := file.readline(LONGEST_LINE):
            number += 1
            problem, text = _text(line, field)
            if problem is None:
                yield text
            elif damaged is not None:
                damaged[str(path), start] = problem
            else:
                raise DataError(
                    f"{path}, line {number} at byte {start}: {problem}; expected a JSON object "
                    f"with text in '{field}'. Correct the line, name another --text_field, or "
                    "leave such lines out with --skip_damaged."
                )
            start += len(line)


def _text(line: bytes, field: str) -> tuple[str | None, str]:
    """What is wrong with a line, None where nothing is; and its text."""
    if not line.strip():
        return None, ""
    try:
        found = json.loads(line.decode("utf-8-sig"))
        if not isinstance(found, dict):
            return f"got {shown_text(json.dumps(found))}", ""
        text = found.get(field)
        if not isinstance(text, str):
            names = ", ".join(found) or "none"
            return f"got no text in '{field}' (fields: {shown_text(names)})", ""
        text.encode()
    except UnicodeEncodeError:
        return "got text with half of a surrogate pair", ""
    except (ValueError, RecursionError):
        return f"got {shown_text(line.decode('utf-8', 'backslashreplace'))}", ""
    return None, text
