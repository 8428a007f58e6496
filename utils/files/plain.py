"""Opening files that users name, or that lie in their folders: nothing that could wait, never end
or be no file at all. What is written goes to no link that somebody has put there.
"""

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from popxl_gpt.utils.errors import PointerError

NOTHING = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG))
"""What the system says where no file has a path."""
NO_FILE = NOTHING | {errno.EISDIR, errno.EINVAL, errno.EFBIG}
"""What it, and what is here, says of a path where nothing is, or something else than a file that
could be there: a folder, a pipe, more than can be. What else it says is no news of the path: a disk
or a network does not answer, memory or rights are lacking.
"""
_UNLINKED = os.O_NOFOLLOW | os.O_CLOEXEC
POINTER, POINTER_BYTES = b"version https://git-lfs.github.com/spec/v1\n", 1024
"""How a pointer of Git LFS begins, and what it has fewer bytes than. Source:
github.com/git-lfs/git-lfs, docs/spec.md.
"""
KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_plain(path: Path) -> int:
    """A descriptor to read a plain file with; OSError says what it is instead (a folder, a pipe, a
    device, a pointer of Git LFS).
    """
    check_plain(path)  # a socket cannot be opened
    return _checked(path, os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))


def append_plain(path: Path) -> int:
    """A descriptor to append to a plain file with, which is made where there is none; OSError as of
    `open_plain`, and where it is a link.
    """
    with suppress(FileNotFoundError):
        check_plain(path)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | _UNLINKED
    try:
        return _checked(path, os.open(path, flags, 0o666))
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "Not a plain file, but a link", str(path)) from error


def create_plain(path: Path) -> int:
    """A descriptor to write a new file with, in the place of one of its name. Of a link the name is
    taken, and what it leads to stays; OSError where a folder is there.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _UNLINKED
    try:
        return os.open(path, flags, 0o666)
    except FileExistsError:
        os.unlink(path)
        return os.open(path, flags, 0o666)


def write_plain(path: Path, content: "bytes | str") -> None:
    """Write a whole file, see `create_plain`; text as UTF-8."""
    with open(create_plain(path), "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def names_in(folder: Path) -> "list[str]":
    """The names in a folder, in order; none where there is no such folder. `Path.glob`, `glob.glob`
    and `os.walk` take a folder that cannot be read for an empty one.

    Raises:
        OSError: it cannot be read.
    """
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        if error.errno not in NOTHING:
            raise
    return []


def is_file(path: Path) -> bool:
    """Whether a path leads to a plain file; OSError where that cannot be told, which
    `os.path.isfile` takes for no.
    """
    return _has_kind(path, stat.S_ISREG)


def is_folder(path: Path) -> bool:
    """Whether a path leads to a folder; OSError where that cannot be told."""
    return _has_kind(path, stat.S_ISDIR)


def _has_kind(path: Path, is_kind: "Callable[[int], bool]") -> bool:
    try:
        return is_kind(os.stat(path).st_mode)
    except OSError as error:
        if error.errno not in NOTHING:
            raise
    except ValueError:  # no file can have the name
        pass
    return False


def real_path(path: Path) -> Path:
    """The place that a path leads to; a path that leads in a circle is left as it is there, where
    `Path.resolve` raises.
    """
    return Path(os.path.realpath(path))


def check_plain(path: Path) -> os.stat_result:
    """What is known of a plain file; OSError as of `open_plain`."""
    status = os.stat(path)
    _check(path, status.st_mode)
    if len(POINTER) < status.st_size < POINTER_BYTES and _is_pointer(path):
        raise PointerError(
            errno.EINVAL, "A pointer of Git LFS, not the file: run git lfs pull", str(path)
        )
    return status


def _is_pointer(path: Path) -> bool:
    with suppress(OSError):  # who opens it is told
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.pread(number, len(POINTER), 0) == POINTER
        finally:
            os.close(number)
    return False


def _checked(path: Path, number: int) -> int:
    """The descriptor of a plain file; any other is closed, and OSError says what it is."""
    try:
        _check(path, os.fstat(number).st_mode)
    except OSError:
        os.close(number)
        raise
    return number


def _check(path: Path, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = next((name for is_one, name in KINDS if is_one(mode)), "something else")
    raise OSError(errno.EINVAL, f"Not a plain file, but {kind}", str(path))
