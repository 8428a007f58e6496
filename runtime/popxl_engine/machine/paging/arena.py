"""Memory of a fixed size, cut into extents as rows come and go."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from popxl_engine.machine.device import PROCESSOR, Device
from popxl_engine.machine.paging.access_trace import NEVER

LARGE = 8
"""Rows of at least one part in so many of an arena are large for it."""

Window = tuple[int, int]
"""Neighbouring extents, from one to before another."""


@dataclass
class Extent:
    """A segment of the arena: of a row, or free."""

    start: int
    size: int
    row: Any = None
    after: list[Any] = field(default_factory=list)
    """What must be done before a free one is used."""


def until_now(device: Device) -> list[Any]:
    """What must be done before memory that a device has just given is used by anything but its
    program.
    """
    fence = device.fence()
    return [] if fence is None else [fence]


class Arena:
    """One block of a device's memory. Raises as `Device.memory`."""

    def __init__(self, nbytes: int, device: Device = PROCESSOR):
        self._memory = device.memory(nbytes)
        self.bytes = self._memory.bytes
        self.extents: list[Extent] = [Extent(0, nbytes, after=until_now(device))]

    def find(
        self, size: int, eviction_priority: Callable[[Any], float | None], above: float
    ) -> Window | None:
        """The neighbouring extents that together hold ``size`` bytes and are missed least.

        Args:
            eviction_priority: of a row: the higher, the less it is missed; None where it must stay.
            above: what no eviction_priority may fall to. Free extents are missed least of all.
        Returns:
            None where there are none. What is large for the arena takes free memory, or goes to the
            arena's beginning or beside something as large, if it can, so that such rows leave room
            for each other.
        """
        is_large, best, found = size * LARGE >= len(self.bytes), (False, above, 0), None
        lowest: deque[tuple[float, int]] = deque()
        """Priorities from the lowest on, each with its position, as far as they can still become
        the lowest of a window.
        """
        left = total = 0
        for right, extent in enumerate(self.extents):
            value = NEVER if extent.row is None else eviction_priority(extent.row)
            if value is None or value <= above:
                left, total = right + 1, 0
                lowest.clear()
                continue
            total += extent.size
            while lowest and lowest[-1][0] >= value:
                lowest.pop()
            lowest.append((value, right))
            while total - self.extents[left].size >= size:
                total -= self.extents[left].size
                left += 1
            while lowest[0][1] < left:
                lowest.popleft()
            if total >= size:
                is_apart = is_large and lowest[0][0] < NEVER and not self._is_beside(left, size)
                score = (not is_apart, lowest[0][0], -total)
                if score > best:
                    best, found = score, (left, right + 1)
        return found

    def _is_beside(self, index: int, size: int) -> bool:
        """Whether an extent is the first one, or comes after a row of at least so many bytes."""
        before = self.extents[index - 1] if index else None
        return before is None or before.row is not None and before.size >= size

    def allocate(self, window: Window, size: int, row: Any, after: list[Any]) -> torch.Tensor:
        """Give extents to a row. Returns its memory.

        Args:
            after: what must be done before the memory is used; it goes with the part that is left
                over, too.
        """
        begin, end = window
        start, rest = self.extents[begin].start, sum(e.size for e in self.extents[begin:end]) - size
        cut = [Extent(start, size, row)]
        if rest:
            if end < len(self.extents) and self.extents[end].row is None:
                after = [*after, *self.extents[end].after]
                rest += self.extents[end].size
                end += 1
            cut.append(Extent(start + size, rest, after=after))
        self.extents[begin:end] = cut
        return self.bytes[start : start + size]

    def pieces(self, free: Sequence[Extent], size: int) -> list[Extent]:
        """The first of some free extents, ``size`` bytes together. Of the last one, the others keep
        what is left.
        """
        found = []
        for extent in free:
            if size and extent.size > size:
                rest = Extent(extent.start + size, extent.size - size, after=extent.after)
                self.extents.insert(self.extents.index(extent) + 1, rest)
                extent.size = size
            if size:
                found.append(extent)
                size -= extent.size
        return found

    def decommit(self, extent: Extent) -> None:
        """Let the system take the memory of an extent until it is used again; its contents are
        lost.
        """
        self._memory.decommit(extent.start, extent.size)
