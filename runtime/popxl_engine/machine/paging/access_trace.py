"""The order in which a run takes rows, and when it takes each one next. Every run is the same."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence

NEVER = float("inf")


class AccessTrace:
    """The loads and stores of one run, as numbers of rows. A time is a number of events, counted
    over all runs.

    Args:
        events: (row, whether it is a store) in order; at least one.
        sizes: bytes of each row.
    """

    def __init__(self, events: Iterable[tuple[int, bool]], sizes: Sequence[int]):
        self._rows, self._stores, self._moved = array("q"), bytearray(), array("q", [0])
        self._uses: dict[int, array[int]] = {}
        for position, (row, stores) in enumerate(events):
            self._rows.append(row)
            self._stores.append(stores)
            self._moved.append(self._moved[-1] + sizes[row])
            self._uses.setdefault(row, array("q")).append(position)

    def __len__(self) -> int:
        return len(self._rows)

    def at(self, time: int) -> tuple[int, bool]:
        """The row of an event, and whether it is a store."""
        position = time % len(self._rows)
        return self._rows[position], bool(self._stores[position])

    def next_use(self, row: int, time: int) -> float:
        """The first time from one on at which a row is used."""
        return self._use(row, time, 0)

    def last_use(self, row: int, time: int) -> float:
        """The last time before one at which a row is used."""
        return self._use(row, time, -1)

    def _use(self, row: int, time: int, step: int) -> float:
        uses = self._uses.get(row)
        if uses is None:
            return -NEVER if step else NEVER
        run, position = divmod(time, len(self._rows))
        more, index = divmod(bisect_left(uses, position) + step, len(uses))
        return (run + more) * len(self._rows) + uses[index]

    def moved_until(self, time: float) -> float:
        """Bytes of the rows that are used before a time."""
        if time == -NEVER:
            return time
        run, position = divmod(int(time), len(self._rows))
        return run * self._moved[-1] + self._moved[position]

    def begins_with_store(self, row: int) -> bool:
        """Whether a run writes a row before it reads it, so that runs leave nothing to each other
        in it.
        """
        return row in self._uses and bool(self._stores[self._uses[row][0]])
