"""Raw files of variables that are mapped into memory, in a folder that no other user can write to.

What is in them is trained on without being looked at, and what is written goes wherever their names
lead. So everything is opened below a descriptor of the folder, which was checked; no link is
followed.
"""

import fcntl
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import numpy as np
from poprun import private
from popxl.errors import RemoteMemoryError


def is_there(path: Path) -> bool:
    """Whether anything has the name, be it a link that leads nowhere."""
    return os.path.lexists(path)


def map_file(
    path: Path, dtype: np.dtype, shape: Sequence[int], size: int, mode: Literal["r", "r+"]
) -> np.memmap:
    """An array in a file of ``size`` bytes, all of its space reserved where it is written to.

    Raises:
        ValueError: the file has another size.
        RemoteMemoryError: it cannot be mapped, or another user can have written it.
    """
    flags = os.O_RDWR if mode == "r+" else os.O_RDONLY
    try:
        with _opened(path.parent) as folder:
            number = private.open_file(path, flags, folder)
        with open(str(path), "rb" if mode == "r" else "r+b", opener=lambda *_: number) as file:
            if (found := os.fstat(number).st_size) != size:
                raise ValueError(
                    f"got {path} of {found} bytes; expected {size} for {dtype}{list(shape)}. "
                    "Remove the file, or choose another memmap_dir."
                )
            if mode == "r+":
                os.posix_fallocate(number, 0, size)  # it may have holes
            return np.memmap(file, dtype, mode, shape=tuple(shape))
    except OSError as error:
        raise RemoteMemoryError(
            f"{path}: got '{error.strerror or error}' while mapping a file; expected one of this "
            f"user that can be mapped with mode '{mode}'. Mend its permissions, free some space, "
            "or choose another folder."
        ) from error


def make_file(
    path: Path, dtype: np.dtype, shape: Sequence[int], size: int, data: np.ndarray | None
) -> None:
    """A file with all of its space and data, zeros where there are none, unless another process has
    just made it. Folders that are missing are made, for this user alone.

    Raises:
        RemoteMemoryError: the folder does not take it, or another user can write to that.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _opened(path.parent) as folder, _one_at_a_time(folder):
            if _has(folder, path.name):
                return
            with _new_file(folder, path.name) as number:
                os.posix_fallocate(number, 0, size)
                if data is not None:
                    with os.fdopen(number, "r+b", closefd=False) as file:
                        np.memmap(file, dtype, "r+", shape=tuple(shape))[...] = data
    except OSError as error:
        raise RemoteMemoryError(
            f"{path}: got '{error.strerror or error}' while making a file; expected a folder of "
            "this user, on a disk that takes it. Free some space, or choose another one."
        ) from error


def copy_files(paths: Sequence[Path], target: Path) -> None:
    """Copies of files in a folder, which is made where it is missing; they replace others of their
    names. Raises as `make_file`.
    """
    try:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _opened(target) as folder:
            for path in paths:
                with open(path, "rb") as source, _new_file(folder, path.name) as number:
                    with os.fdopen(number, "wb", closefd=False) as copy:
                        shutil.copyfileobj(source, copy)
    except OSError as error:
        raise RemoteMemoryError(
            f"{target}: got '{error.strerror or error}' while copying files; expected a folder of "
            "this user, on a disk that takes them. Free some space, or choose another one."
        ) from error


def remove_files(path: Path, names: Iterable[str]) -> None:
    """Remove files of a folder, those of the names that are there. Who has one mapped keeps it.

    Raises:
        OSError: another user can write to the folder, or it does not let them go.
    """
    with suppress(FileNotFoundError), _opened(path) as folder:
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = private.open_folder(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _new_file(folder: int, name: str) -> Iterator[int]:
    """A descriptor of a file that takes its name at the end, or goes after an error."""
    part = f"{name}.part"
    with suppress(FileNotFoundError):
        os.unlink(part, dir_fd=folder)  # of a process that was killed
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    number = os.open(part, flags, stat.S_IRUSR | stat.S_IWUSR, dir_fd=folder)
    try:
        yield number
        os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(part, dir_fd=folder)
        raise
    finally:
        os.close(number)


def _has(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


@contextmanager
def _one_at_a_time(folder: int) -> Iterator[None]:
    """Other processes wait here for this one to be done with a folder, where the file system knows
    locks.
    """
    with suppress(OSError):
        fcntl.flock(folder, fcntl.LOCK_EX)
    yield
