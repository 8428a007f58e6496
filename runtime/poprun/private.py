"""Files and folders that no other user has written, and none can change or replace.

What is executed or believed without looking at it further is only taken from such places: compiled
kernels, secrets, the sockets by which the instances of a machine meet, variables that are mapped
from files. Root is trusted; other users of the machine are not.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
MOST_LINKS = 40
"""Links that lead to one folder; as many as the system follows (path_resolution(7))."""


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


def open_folder(path: Path, links: int = MOST_LINKS) -> int:
    """A descriptor of a folder of this user's or root's that nobody else can write to. What is
    opened below the descriptor is in that folder, whoever can rename it, or those above.

    A link in its place is followed if it is this user's or root's.

    Raises:
        NotPrivate: it belongs to another user, or somebody else can write to it.
        OSError: it is not there.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        if not os.path.islink(path) or links == 0:
            raise
        return open_folder(path.parent / _read_link(path), links - 1)
    try:
        _check(path, os.fstat(descriptor), stat.S_ISDIR, "a folder", is_roots_too=True)
    except NotPrivate:
        os.close(descriptor)
        raise
    return descriptor


def _read_link(path: Path) -> str:
    """The place where a link of this user's or root's leads."""
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_uid not in (os.getuid(), 0):
            raise NotPrivate(f"{path} is a link of another user")
        return os.readlink("", dir_fd=descriptor)
    finally:
        os.close(descriptor)


def open_file(path: Path, flags: int = os.O_RDONLY, folder: int | None = None) -> int:
    """A descriptor of a plain file of this user that nobody else can write to. Waits for nothing.

    Args:
        folder: descriptor of the folder that ``path`` is in, as `open_folder` gives it; a file in
            it may be root's, too.
    Raises:
        NotPrivate: it is a link, a pipe or a device, belongs to another user, or others can write
            to it.
        OSError: it is not there.
    """
    place = path if folder is None else path.name
    try:
        descriptor = os.open(
            place, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder
        )
    except OSError as error:
        try:
            status = os.stat(place, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            raise error from None
        if not stat.S_ISREG(status.st_mode):  # a link, or a socket
            raise NotPrivate(f"{path} is not a plain file") from error
        raise
    try:
        _check(path, os.fstat(descriptor), stat.S_ISREG, "a plain file", folder is not None)
    except NotPrivate:
        os.close(descriptor)
        raise
    return descriptor


def _check(
    path: Path,
    status: os.stat_result,
    is_kind: Callable[[int], bool],
    kind: str,
    is_roots_too: bool = False,
) -> None:
    if not is_kind(status.st_mode):
        raise NotPrivate(f"{path} is not {kind}")
    if status.st_uid != os.getuid() and not (is_roots_too and status.st_uid == 0):
        raise NotPrivate(f"{path} belongs to another user")
    if status.st_mode & OTHERS_WRITE:
        raise NotPrivate(f"other users may write to {path}; chmod go-w {path}")
