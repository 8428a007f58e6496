"""What the cache knows of a row, and of a transfer of its contents."""

from collections.abc import Sequence

import torch

from popxl_engine.machine.device import Fence
from popxl_engine.machine.paging.access_trace import NEVER


class Row:
    """What the cache knows of a row.

    Args:
        start: offset in the store. size: bytes there and in memory, a multiple of the store's
            blocks.
        carries: whether its contents may be asked for outside the trace, or by a later run.
    """

    __slots__ = (
        *("index", "start", "size", "carries", "memory", "holds", "queued"),
        *("dirty", "pins", "next", "seen", "later", "passed", "last", "fence", "after", "is_apart"),
    )

    def __init__(self, index: int, start: int, size: int, carries: bool):
        self.index, self.start, self.size, self.carries = index, start, size, carries
        self.memory: torch.Tensor | None = None
        """Its bytes in the arena."""
        self.is_apart = False
        """Whether its memory lies beside the arena, in place of several pieces of it."""
        self.holds = False
        """Whether its memory has its contents."""
        self.queued = False
        """Whether it is being read, or will be."""
        self.dirty = False
        """Whether its memory is newer than the store."""
        self.pins = 0
        self.next: float = NEVER
        """Time of its next use; without a trace, the later its last one was, the lower."""
        self.seen, self.later, self.passed = NEVER, -NEVER, -NEVER
        """The next use as looked ahead to from times from `seen` to `later` on: when it is used
        next, and `AccessTrace.moved_until` when it was used last.
        """
        self.last: Transfer | None = None
        """The write of its contents that was begun last."""
        self.fence: Fence | None = None
        """What the device was asked to do with it, until it was last given back."""
        self.after: list[Before] = []
        """What must be done with the memory that is now its own, before it is used."""


class Staying:
    """A row that has memory of its own as long as its session has any.

    Args:
        start: offset in that part of memory, and in its store. size: bytes there, a multiple of the
            store's blocks.
    """

    __slots__ = ("start", "size", "shape", "dtype", "memory", "tensor")

    def __init__(self, start: int, size: int, shape: Sequence[int], dtype: torch.dtype):
        self.start, self.size, self.shape, self.dtype = start, size, tuple(shape), dtype
        self.memory: torch.Tensor | None = None
        """Its bytes; None while the memory is given up."""
        self.tensor: torch.Tensor | None = None
        """Its values there."""

    def set_memory(self, memory: torch.Tensor | None) -> None:
        """Take some bytes as its own, or none."""
        nbytes = torch.Size(self.shape).numel() * self.dtype.itemsize
        self.memory = memory
        self.tensor = None if memory is None else memory[:nbytes].view(self.dtype).view(self.shape)


class Transfer:
    """A row's contents on their way between memory and the store.

    Args:
        fences: what the device does there before.
    """

    __slots__ = ("row", "memory", "fences", "is_done")

    def __init__(self, row: Row, memory: torch.Tensor, fences: Sequence[Fence]):
        self.row, self.fences, self.is_done = row, fences, False
        self.memory: torch.Tensor | None = memory
        """None once it is done."""


Before = Transfer | Fence
"""What memory waits for: something that is written from it, or that the device does with it."""
