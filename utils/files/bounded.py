"""Reading what a user names without believing it: no more than so many bytes, of a plain file,
without waiting.
"""

import codecs
import errno
import json
import os
from pathlib import Path
from typing import Any

from popxl_gpt.utils.errors import DataError, unreadable
from popxl_gpt.utils.files.plain import open_plain

PIECE_BYTES = 2**20
JSON_VALUES = 2**21
"""Values of a JSON text that describes something. Each takes about a hundred bytes of memory."""
SHOWN = 100
"""Characters of a value that messages show."""


def read_bounded(path: Path, limit: int) -> bytes:
    """A file's content.

    Raises:
        OSError: it cannot be read, is no plain file (a pipe, a device), or has more than `limit`
            bytes.
    """
    with open(open_plain(path), "rb") as file:
        size, content = os.fstat(file.fileno()).st_size, bytearray()
        # in pieces: the system is not asked for memory that the file has no bytes for
        while max(size, len(content)) <= limit:
            piece = file.read(min(PIECE_BYTES, limit + 1 - len(content)))
            if not piece:
                return bytes(content)
            content += piece
    raise OSError(errno.EFBIG, f"More than {limit} bytes", str(path))


def parse_json(content: bytes, most: int = JSON_VALUES, **hooks: Any) -> Any:
    """What a JSON text says. Lists in a few bytes each take twenty times the memory of their text,
    so their number is bounded before they are made.

    Args:
        hooks: of `json.loads`.
    Raises:
        ValueError: it is no JSON in UTF-8, nested without end, or has more than `most` values.
    """
    if sum(map(content.count, (b",", b"[", b"{"))) > most:
        raise ValueError(f"more than {most} values")
    try:
        return json.loads(content.removeprefix(codecs.BOM_UTF8).decode("utf-8"), **hooks)
    except RecursionError as error:
        raise ValueError("lists inside each other without end") from error


def read_object(path: Path, limit: int, problem: str) -> "dict[str, Any] | None":
    """A file's JSON object; None where there is no file.

    Args:
        limit: as of `read_bounded`.
        problem: what is wrong with a file that holds no object, as `got ..; expected ..`.
    Raises:
        DataError: it cannot be read, or holds none.
    """
    try:
        found = parse_json(read_bounded(path, limit))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise DataError(f"{path}: {problem}")
    return found


def shown(value: Any) -> str:
    """A value as a configuration has it, unless it is too long to show or has no plain
    characters.
    """
    text = str(value)
    return text if len(text) <= SHOWN and text.isprintable() else shortened(value)


def shortened(value: Any) -> str:
    """A value as messages show it, however large it is."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"a whole number of about {int(value.bit_length() * 0.30103) + 1} digits"
    if isinstance(value, str) and len(value) > SHOWN:
        return f"{value[:SHOWN]!r}... ({len(value)} characters)"
    text = repr(value)
    return text if len(text) <= 2 * SHOWN else f"{text[:SHOWN]}... ({type(value).__name__})"
