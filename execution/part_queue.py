"""What one thread reads and another one writes, and how much of it there is at a time."""

import mmap
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

Part = tuple[str, dict[str, np.ndarray]]
"""A layer, and host data of its variables by their names in its file."""
ALIGNMENT = 64
"""Bytes."""


class PartQueue:
    """Parts that are handed over, and not yet written.

    Args:
        room: bytes that they may have together; a single one may have more.
    """

    def __init__(self, room: int):
        self._room = room
        self._parts: deque[Part] = deque()
        self._bytes = 0
        self._has_all = False
        self._is_closed = False
        """Nobody takes parts any more."""
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def put(self, part: Part) -> None:
        """Hand a part over, once there is room for it. Without one who takes it, it is dropped."""
        nbytes = bytes_of(part)
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or not self._bytes or self._bytes + nbytes <= self._room
            )
            if not self._is_closed:
                self._parts.append(part)
                self._bytes += nbytes
                self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """Note that all parts are there, or, after an error, all that there will be: what takes
        parts gets the error.
        """
        with self._changed:
            self._has_all, self._error = True, self._error or error
            self._changed.notify_all()

    def taken(self) -> Iterator[Part]:
        """The parts. Each counts as written when the next one is asked for."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._error or self._parts or self._has_all)
                if self._error is not None:
                    raise self._error
                if not self._parts:
                    return
                part = self._parts.popleft()
            nbytes = bytes_of(part)
            yield part
            del part
            with self._changed:
                self._bytes -= nbytes
                self._changed.notify_all()

    def close(self) -> None:
        """Take no more parts."""
        with self._changed:
            self._is_closed = True
            self._parts.clear()
            self._changed.notify_all()


def bytes_of(part: Part) -> int:
    """Bytes of a part's arrays."""
    return sum(array.nbytes for array in part[1].values())


def copied(part: Part) -> Part:
    """A copy in memory of its own, which the system has again as soon as nobody has the arrays: the
    allocator of a process that trains keeps what it once had.
    """
    layer, arrays = part
    starts, end = {}, 0
    for name, array in arrays.items():
        starts[name] = end
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    memory = mmap.mmap(-1, max(end, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    copies = {}
    for name, array in arrays.items():
        copies[name] = np.ndarray(array.shape, array.dtype, memory, starts[name])
        copies[name][...] = array
    return layer, copies
