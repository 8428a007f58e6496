"""What the cache knows of a row, and of a write that is under way."""

from typing import List, Optional

import numpy as np

from popxl_engine.machine.tier.course import NEVER


class Row:
    """What the cache knows of a row.

    Args:
        start: place in the file. size: bytes there and in memory, a multiple of the file's blocks.
        carries: whether its contents may be asked for outside the course, or by a later run.
    """

    __slots__ = (
        *("number", "start", "size", "carries", "memory", "holds", "queued"),
        *("dirty", "pins", "next", "last", "after", "is_apart"),
    )

    def __init__(self, number: int, start: int, size: int, carries: bool):
        self.number, self.start, self.size, self.carries = number, start, size, carries
        self.memory: Optional[np.ndarray] = None
        """Its bytes in the arena."""
        self.is_apart = False
        """Whether its memory lies beside the arena, in place of several pieces of it."""
        self.holds = False
        """Whether its memory has its contents."""
        self.queued = False
        """Whether it is being read, or will be."""
        self.dirty = False
        """Whether its memory is newer than the file."""
        self.pins = 0
        self.next: float = NEVER
        """Time of its next use; without a course, the later its last one was, the lower."""
        self.last: Optional[Write] = None
        """The write of its contents that was begun last."""
        self.after: List[Write] = []
        """Writes from the memory that is now its own."""


class Write:
    """A row's contents on their way to the file."""

    __slots__ = ("row", "memory", "is_done")

    def __init__(self, row: Row, memory: np.ndarray):
        self.row, self.is_done = row, False
        self.memory: Optional[np.ndarray] = memory
