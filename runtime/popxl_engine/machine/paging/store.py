"""A file for a replica's rows. Its space is reserved at the start, and no name of it could outlive
the process.
"""

import errno
import fcntl
import functools
import logging
import mmap
import os
import tempfile
from pathlib import Path
from typing import Protocol

import torch
from poprun.cgroups import unescaped
from popxl.errors import RemoteMemoryError

logger = logging.getLogger("popxl")

BLOCK = 4096
"""Bytes; offsets and sizes of direct transfers are multiples of it."""
NO_SUCH_WAY = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
"""What a file system says that knows no files without a name, or no direct transfers."""
IN_MEMORY = ("tmpfs", "ramfs")
REMOTE = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "9p",
    "ceph",
    "lustre",
    "gpfs",
    "glusterfs",
    "fuse.glusterfs",
    "fuse.sshfs",
)
MOUNTS = Path("/proc/self/mountinfo")


class Store(Protocol):
    """What rows are read from and written to."""

    is_direct: bool
    """Whether transfers go past the system's page cache."""

    def read(self, start: int, into: torch.Tensor) -> None:
        """Fill memory, uint8 [n], with the bytes from an offset on."""

    def write(self, start: int, data: torch.Tensor) -> None:
        """Write bytes, uint8 [n], at an offset."""

    def close(self) -> None:
        """Give the space back."""


class FileStore:
    """An unnamed file in a folder.

    Args:
        nbytes: reserved at once, so that a full disk is an error here and not later.
        direct: go past the page cache where the file system can.
    Raises:
        RemoteMemoryError: the folder takes no such file; later, a transfer that failed.
    """

    def __init__(self, folder: str, nbytes: int, direct: bool = True):
        self.folder = folder
        try:
            os.makedirs(folder, exist_ok=True)
            self._file = _unnamed_file(folder)
        except OSError as error:
            raise self._error(
                error, "making a file", "a folder that takes files", "Choose another one"
            ) from error
        try:
            there = os.fstatvfs(self._file)
            # before others feel it that the disk is full
            if nbytes > there.f_bavail * there.f_frsize:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if nbytes:
                os.posix_fallocate(self._file, 0, nbytes)
            self.is_direct = direct and (not nbytes or _go_direct(self._file))
        except OSError as error:
            self.close()
            what = f"reserving {nbytes} bytes for remote memory"
            raise self._error(
                error, what, "that much space", "Free some, or choose a folder on another disk"
            ) from error
        tell_of_slow_ways(folder, self.is_direct)

    def read(self, start: int, into: torch.Tensor) -> None:
        """See `Store`."""
        done, memory = 0, into.numpy().data
        try:
            while done < len(memory):
                count = os.preadv(self._file, [memory[done:]], start + done)
                if count == 0:
                    raise OSError(errno.EIO, "end of file")
                done += count
            if not self.is_direct:
                os.posix_fadvise(self._file, start, len(memory), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._failed(error, "reading") from error

    def write(self, start: int, data: torch.Tensor) -> None:
        """See `Store`."""
        done, memory = 0, data.numpy().data
        try:
            while done < len(memory):
                done += os.pwritev(self._file, [memory[done:]], start + done)
            if not self.is_direct:
                os.fdatasync(self._file)
                os.posix_fadvise(self._file, start, len(memory), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._failed(error, "writing") from error

    def close(self) -> None:
        """See `Store`."""
        os.close(self._file)

    def _failed(self, error: OSError, what: str) -> RemoteMemoryError:
        return self._error(
            error, f"{what} remote memory", "a disk that works", "Go on from the last checkpoint"
        )

    def _error(self, error: OSError, what: str, expected: str, remedy: str) -> RemoteMemoryError:
        return RemoteMemoryError(
            f"{self.folder}: got '{error.strerror}' while {what}; expected {expected}. {remedy}."
        )


def _unnamed_file(folder: str) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in NO_SUCH_WAY:
            raise
    file, path = tempfile.mkstemp(dir=folder)
    os.unlink(path)
    return file


def _go_direct(file: int) -> bool:
    """Switch the page cache off for a file, if it then takes and gives a block."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    with mmap.mmap(-1, BLOCK) as block:
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
            if os.pwritev(file, [block], 0) == os.preadv(file, [block], 0) == BLOCK:
                return True
        except OSError as error:
            if error.errno not in NO_SUCH_WAY:
                raise
    fcntl.fcntl(file, fcntl.F_SETFL, flags)
    return False


@functools.cache
def tell_of_slow_ways(folder: str, is_direct: bool) -> None:
    """Say in the log, once for a folder, that rows there are slow or take memory."""
    kind = file_system(folder)
    if kind in IN_MEMORY:
        logger.warning(
            "%s: lies in memory (%s), which its rows take as well. Choose a folder on a disk.",
            folder,
            kind,
        )
    elif kind in REMOTE:
        logger.warning(
            "%s: lies on another machine (%s). A folder on a local disk is faster.", folder, kind
        )
    elif not is_direct:
        logger.warning(
            "%s (%s): knows no direct transfers; rows go through the page cache, more slowly.",
            folder,
            kind,
        )


def file_system(folder: str, mounts: Path = MOUNTS) -> str:
    """The kind of file system that a folder is on, as the system names it; "unknown" where it does
    not.
    """
    path, best, found = Path(os.path.realpath(folder)), -1, "unknown"
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return found
    for line in lines:  # of mounts on one folder, the last one is seen
        mounted, _, kind = line.partition(" - ")
        point = Path(unescaped(mounted.split()[4]))
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), kind.split()[0]
    return found
