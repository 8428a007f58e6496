"""Reading what a user names without believing it: no more than so many bytes, of a plain file,
without waiting.
"""

import errno
import os
import stat
from pathlib import Path
from typing import Any

SHOWN = 100
"""Characters of a value that messages show."""


def read_bounded(path: Path, limit: int) -> bytes:
    """A file's content.

    Raises:
        OSError: it cannot be read, is no plain file (a pipe, a device), or has more than `limit`
            bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "Not a plain file", str(path))
        content = b""
        if status.st_size <= limit:
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(limit + 1)
    finally:
        os.close(descriptor)
    if max(status.st_size, len(content)) > limit:
        raise OSError(errno.EFBIG, f"More than {limit} bytes", str(path))
    return content


def shortened(value: Any) -> str:
    """A value as messages show it, however large it is."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"a whole number of about {int(value.bit_length() * 0.30103) + 1} digits"
    if isinstance(value, str) and len(value) > SHOWN:
        return f"{value[:SHOWN]!r}... ({len(value)} characters)"
    text = repr(value)
    return text if len(text) <= 2 * SHOWN else f"{text[:SHOWN]}... ({type(value).__name__})"
