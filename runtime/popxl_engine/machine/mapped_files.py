"""Files that are memory: what becomes of a process when one of them is cut off, or its disk fails,
while it is used.

Such an access has no error that code could return: the system sends the thread SIGBUS, which ends
the process without a word. Here it ends in words instead, with exit code 2.
"""

import ctypes
import os
import signal
import threading
from typing import NoReturn

import numpy as np
from popxl.tensor import Variable

EXIT_CODE = 74
"""EX_IOERR of sysexits.h: it is no setting that fails, and another start may go on."""
_watched: dict[str, int] = {}
"""Paths of mapped files, and the bytes that each had when it was mapped."""
_reporting = threading.Lock()
"""A lock that is held for ever by the first thread that reports."""
_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)


def can_be_mapped(variable: Variable, replicas: int) -> bool:
    """Whether a memory-mapped file may be a variable's row: where one replica holds the whole
    value, in the file's format, and it fills its slot.

    Args:
        replicas: of this process.
    """
    location = variable.location_info
    return (
        location is not None
        and location.shard_over == 1
        and replicas == variable.replica_grouping.group_size == 1
        and variable.nelms == location.room
        and str(variable.dtype.name) != "bfloat16"
    )


def watch(array: np.memmap) -> None:
    """Let the process end in words where the file under an array does not give what it had any
    more.
    """
    if not _watched:
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        libc.signal(int(signal.SIGBUS), ctypes.cast(_on_bus_error, ctypes.c_void_p))
    if array.filename is not None:
        _watched[str(array.filename)] = array.offset + array.nbytes


@_handler
def _on_bus_error(number: int) -> NoReturn:
    """Runs in the thread that touched what is not there, which cannot go on: it says why, and ends
    the process. Several threads of one operation get here at once: one of them speaks.
    """
    _reporting.acquire()
    try:
        os.write(2, f"error: {message()}\n".encode("utf-8", "backslashreplace"))
    finally:
        os._exit(EXIT_CODE)


def message() -> str:
    """What is wrong with the mapped files."""
    for path, size in _watched.items():
        try:
            found = os.stat(path).st_size
        except OSError:  # deleted: then it still has all that it had
            continue
        if found < size:
            return (
                f"{path}: got {found} bytes; expected the {size} that are mapped into memory. "
                "Another program cut the file off while it was used: keep others out of the "
                "folder, and start again from a checkpoint."
            )
    return (
        "mapped files: got a bus error; expected to read and write "
        f"{', '.join(_watched) or 'them'}. The disk may be failing: start again from a "
        "checkpoint, with another folder."
    )
