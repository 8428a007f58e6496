"""Reading what a user names without believing it: no more than so many bytes, of a plain file,
without waiting.
"""

import errno
import os
from pathlib import Path
from typing import Any

from popxl_gpt.config.plain_files import open_plain

PIECE_BYTES = 2**20
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


def shown(value: Any) -> str:
    """A value as a configuration has it, unless it is too long to show."""
    text = str(value)
    return text if len(text) <= SHOWN else shortened(value)


def shortened(value: Any) -> str:
    """A value as messages show it, however large it is."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"a whole number of about {int(value.bit_length() * 0.30103) + 1} digits"
    if isinstance(value, str) and len(value) > SHOWN:
        return f"{value[:SHOWN]!r}... ({len(value)} characters)"
    text = repr(value)
    return text if len(text) <= 2 * SHOWN else f"{text[:SHOWN]}... ({type(value).__name__})"
