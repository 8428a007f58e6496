"""Objects of JSON: one a line, or an array of them, or one after the other."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from popxl_gpt.data.compression import open_text, plain_suffix
from popxl_gpt.data.json_values import DECODER, TooLongError, ValueReader
from popxl_gpt.data.plain_text import check_head
from popxl_gpt.data.rows import Rows
from popxl_gpt.utils.texts import shown_text

SUFFIXES = (".jsonl", ".ndjson", ".json")
PROGRAMS = (
    ".py", ".pyi", ".js", ".mjs", ".cjs", ".ts", ".jsx", ".tsx", ".rb", ".pl", ".jl", ".nix",
)  # fmt: skip
"""Endings of sources in languages of which a list, or an object, may be a whole program."""
LONGEST_LINE = 2**30
"""Bytes of a line."""


def is_json(path: Path) -> bool:
    """Whether a file's name says so, compressed or not, or what it holds."""
    suffix = plain_suffix(path)
    return suffix in SUFFIXES or suffix not in PROGRAMS and _holds_json(path)


def _holds_json(path: Path) -> bool:
    """Whether a file begins with an object or an array, and holds nothing, or more of the kind,
    after it. Of a long array of objects the first is looked at, of one of other values all are.
    """
    with open_text(path) as file:
        reader = ValueReader(file)
        first = reader.next_character()
        try:
            if first == "[":
                return _begins_array(reader)
            if first != "{":
                return False
            reader.value()
            following = reader.next_character()
            if following == "{":
                reader.take()
                return reader.next_character() in ('"', "}")
            return not following
        except TooLongError:
            return True
        except ValueError:
            return False


def _begins_array(reader: ValueReader) -> bool:
    """Whether JSON follows, as of `_holds_json`, in an array whose bracket comes next."""
    value: Any = None
    while True:
        reader.take()  # the bracket, or a comma
        following = reader.next_character()
        if following == "{" and value and isinstance(value, dict):
            return True
        if following != "]":
            value = reader.value()
            if reader.next_character() == ",":
                continue
        is_closed = reader.next_character() == "]"
        reader.take()
        return is_closed and not reader.next_character()


def json_rows(path: Path) -> Rows:
    """Yield a file's objects; empty lines count for nothing. Where its first object has a line
    of its own it is of lines, each of which is read whatever the others are.
    """
    with open_text(path) as file:
        check_head(path, file)
        reader = ValueReader(file)
        is_of_lines = reader.next_character() != "["
        if is_of_lines:
            with suppress(ValueError):  # its line is named then
                reader.value()
                is_of_lines = reader.is_one_line
                if reader.next_character() == "{" and not reader.is_new_line:
                    reader.value()
                    is_of_lines = False
    yield from (_lines if is_of_lines else _values)(path)


def _lines(path: Path) -> Rows:
    """Places say the byte of the decompressed text."""
    start = number = 0
    with open_text(path) as file:
        while line := file.readline(LONGEST_LINE):
            number += 1
            if line.strip():
                yield f"line {number} at byte {start}", _object(line)
            start += len(line)


def _object(line: bytes) -> dict[str, Any] | ValueError:
    """The object of a line."""
    try:
        return _checked(DECODER.decode(line.decode("utf-8-sig")))
    except (ValueError, RecursionError):
        return ValueError(f"got {shown_text(line.decode('utf-8', 'backslashreplace'))}")


def _checked(value: Any) -> dict[str, Any] | ValueError:
    """A value that is an object, or what is wrong with it."""
    if isinstance(value, (dict, ValueError)):
        return value
    return ValueError(f"got {shown_text(json.dumps(value, default=str))}")


def _values(path: Path) -> Rows:
    """The rows of an array, or of objects one after the other."""
    number = 0
    with open_text(path) as file:
        reader = ValueReader(file)
        try:
            is_array = reader.next_character() == "["
            closing = "]" if is_array else ""
            if is_array:
                reader.take()
            while reader.next_character() != closing:
                number += 1
                place = f"object {number} at byte {reader.byte}"
                yield place, _checked(reader.value())
                if is_array and reader.next_character() != "]":
                    _take(reader, ",")
            if is_array:
                reader.take()
                _take(reader, "")
        except ValueError as error:
            place = f"object {max(1, number)} at byte {reader.byte}"
            yield place, ValueError(f"got what is no JSON ({error}), nor read on after it")


def _take(reader: ValueReader, expected: str) -> None:
    found = reader.next_character()
    if found != expected:
        shown = [repr(each) if each else "the end" for each in (found, expected)]
        raise ValueError(f"{shown[0]} in place of {shown[1]}")
    reader.take()


def whole_characters(text: str) -> str:
    """A text that has a form in UTF-8; ValueError where it has none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("got text with half of a surrogate pair") from error
    return text
