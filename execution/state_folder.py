"""`memmap_dir`: the folder that a program's variables are mapped from. The programs of one process
have it at a time.
"""

import os
from pathlib import Path
from weakref import WeakKeyDictionary, WeakValueDictionary

import popdist
import popxl

from popxl_gpt.config.schema import Config
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.files.folder_lock import FolderLock
from popxl_gpt.utils.files.plain import real_path

_LOCKS: "WeakValueDictionary[Path, FolderLock]" = WeakValueDictionary()
"""The locks of the folders that programs of this process have."""
_OF_PROGRAM: "WeakKeyDictionary[popxl.Ir, FolderLock]" = WeakKeyDictionary()


def state_folder(config: Config, program: str) -> str | None:
    """The folder for the variables' files of the current program; None where they are in memory, or
    in files of the runtime's own.

    Other processes are kept out of `memmap_dir` for as long as the program is there: they would
    remove its files, or train on the same numbers. All programs of this process may have it: a
    program of the same kind makes new files, and the one before keeps those that it has mapped.

    Args:
        program: its kind: names the folder in `memmap_dir`.
    Raises:
        UserError: another process has `memmap_dir`, or it cannot be made.
    """
    named, part_in_memory = config.execution.memmap_dir, config.execution.host_memory
    if named is None or part_in_memory is not None:
        return None
    if popdist.getInstanceIndex() == 0:  # for all instances
        _OF_PROGRAM[popxl.gir()] = _lock(Path(named))
    return os.path.join(named, program)


def _lock(folder: Path) -> FolderLock:
    lock = _LOCKS.get(real_path(folder))
    if lock is not None and lock.is_there():
        return lock
    lock = FolderLock(folder)
    try:
        is_ours = lock.take()
    except OSError as error:
        raise UserError(
            f"--memmap_dir: got '{error.strerror}' for {folder}; expected a folder, or a name for "
            "one. Check what it is and its permissions, or choose another."
        ) from error
    if not is_ours:
        raise UserError(
            f"--memmap_dir: got {folder}, which another program has, or this run for its files; "
            "expected a folder of its own. Wait for that program to end, or choose another, "
            "which is neither the run's folder nor that of its checkpoints."
        )
    _LOCKS[real_path(folder)] = lock
    return lock
