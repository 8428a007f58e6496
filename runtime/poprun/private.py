"""Files and folders that no other user has written, and none can change or replace.

What is executed or believed without looking at it further is only taken from such places: compiled
kernels, secrets, the sockets by which the instances of a machine meet. Root is trusted; other users
of the machine are not.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NotPrivate(PermissionError):
    """Another user can have written a file or a folder, or can replace it."""


def make_folder(path: Path) -> Path:
    """Make a folder, and those above it that are missing, for this user alone. Returns its real
    path.

    Raises:
        NotPrivate: it was there, or is below a folder, and others can write to that.
        OSError: it cannot be made.
    """
    missing = []
    for folder in (path, *path.parents):
        if os.path.lexists(folder):
            break
        missing.append(folder)
    for folder in reversed(missing):
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            pass  # another process of the run was faster
    return check_folder(path)


def check_folder(path: Path) -> Path:
    """The real path of a folder of this user, which nobody else can write to, nor to the folders
    above.

    Of those above, root's may be writable for all where they are sticky, as /tmp is.

    Raises:
        NotPrivate: somebody else can.
        OSError: it is not there.
    """
    real = Path(os.path.realpath(path, strict=True))
    _check(real, os.lstat(real), stat.S_ISDIR, "a folder")
    for above in real.parents:
        status = os.lstat(above)
        is_roots = status.st_uid == 0
        if not is_roots and status.st_uid != os.getuid():
            raise NotPrivate(f"{above} belongs to another user")
        if status.st_mode & OTHERS_WRITE and not (is_roots and status.st_mode & stat.S_ISVTX):
            raise NotPrivate(f"other users may write to {above}; chmod go-w {above}")
    return real


def open_file(path: Path) -> int:
    """A descriptor of a plain file of this user that nobody else can write to, open for reading.
    Waits for nothing.

    Raises:
        NotPrivate: it is a link, a pipe or a device, belongs to another user, or others can write
            to it.
        OSError: it is not there.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            raise NotPrivate(f"{path} is not a plain file") from error  # a link, or a socket
        raise
    try:
        _check(path, os.fstat(descriptor), stat.S_ISREG, "a plain file")
    except NotPrivate:
        os.close(descriptor)
        raise
    return descriptor


def _check(path: Path, status: os.stat_result, is_kind: Callable[[int], bool], kind: str) -> None:
    if not is_kind(status.st_mode):
        raise NotPrivate(f"{path} is not {kind}")
    if status.st_uid != os.getuid():
        raise NotPrivate(f"{path} belongs to another user")
    if status.st_mode & OTHERS_WRITE:
        raise NotPrivate(f"other users may write to {path}; chmod go-w {path}")
