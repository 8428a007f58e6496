"""Folders that a program keeps other programs out of."""

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from popxl_gpt.utils.errors import IO_FAILURES

_LOG = logging.getLogger(__name__)


class FolderLock:
    """A lock on a folder, for programs of one machine: a file system over a network passes on locks
    of files, not of folders. It ends with this object, and with the process, however that ends; it
    is on the folder itself and goes where that is moved.
    """

    def __init__(self, path: Path):
        self.path = path
        self._descriptor: int | None = None
        self._is_told = False

    def take(self) -> bool:
        """Make the folder where it is missing, and lock it. Returns False where another has it.

        Raises:
            OSError: it cannot be made, opened, looked at, or its file system fails.
        """
        while True:
            self.release()
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue  # another, which had made it, could not start and has removed it
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.release()
                return False
            except OSError as error:
                if not _has_no_locks(error):
                    self.release()
                    raise OSError(error.errno, error.strerror, str(self.path)) from error
                _LOG.warning(
                    "%s: this file system has no locks (%s); start no second program here.",
                    self.path,
                    error.strerror,
                )
            if self._has_its_name():
                return True

    def is_there(self) -> bool:
        """Whether the folder has its name still: it was neither deleted nor renamed. So it counts
        while nobody can tell, of which is warned once.
        """
        try:
            found = self._has_its_name()
        except OSError as error:
            if not self._is_told:
                self._is_told = True
                _LOG.warning(
                    "%s: got '%s' while looking for the folder; expected one that can be looked "
                    "at. Training goes on. Check its disk and the permissions of those above it.",
                    self.path,
                    error.strerror,
                )
            return True
        self._is_told = False
        return found

    def _has_its_name(self) -> bool:
        """OSError: that cannot be told now, as where a disk does not answer."""
        if self._descriptor is None:
            return False
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def now_at(self) -> Path | None:
        """The place of a folder that lost its name; None where it was deleted, or nobody knows."""
        try:
            path = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
        except OSError:
            return None
        return path if path.is_dir() else None

    def release(self) -> None:
        """Let others have the folder."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.release()


def _has_no_locks(error: OSError) -> bool:
    """Whether a lock was not given for want of locks in the file system."""
    return not isinstance(error, BlockingIOError) and error.errno not in IO_FAILURES


@contextmanager
def locked(folder: Path, is_own: bool = False, is_needed: bool = True) -> Iterator[None]:
    """A lock on a folder for as long as a block takes; it ends with the process, too.

    Args:
        is_needed: whether a file system without locks is an error.
    Raises:
        OSError: another has it, or it is no folder; with ``is_own``, it belongs to another user.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if is_own and os.fstat(descriptor).st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "belongs to another user", str(folder))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if is_needed or not _has_no_locks(error):
                raise
        yield
    finally:
        os.close(descriptor)
