"""Opening files that users name: nothing that could wait, never end or be no file at all."""

import errno
import os
import stat
from pathlib import Path


def open_plain(path: Path) -> int:
    """A descriptor to read a plain file with; OSError if it is something else (a folder, a pipe, a
    device).
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(number).st_mode
    if stat.S_ISREG(mode):
        return number
    os.close(number)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "Not a plain file", str(path))
