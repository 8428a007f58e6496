"""The choice of the rows that stay in memory."""

from collections.abc import Sequence

from popxl_engine.machine.paging.access_trace import NEVER, AccessTrace
from popxl_engine.machine.paging.hazards import Hazards
from popxl_engine.machine.paging.row import Row


class Replacement:
    """The first to leave is the row whose next use is farthest (Belady 1966).

    Args:
        trace: the rows of every run in order; without it, those leave that were not used for
            longest.
    """

    def __init__(self, rows: Sequence[Row], trace: AccessTrace | None, hazards: Hazards):
        self.trace = trace
        self.now = 0
        """Events of the trace so far, over all runs."""
        self.wanted: Row | None = None
        """The row that the program waits for, which stays."""
        self._rows, self._hazards = rows, hazards
        self._locate()

    def begin(self) -> None:
        """A run begins. One that did not end is forgotten."""
        if self.trace is not None and self.now % len(self.trace):
            self.now += len(self.trace) - self.now % len(self.trace)
            self._locate()

    def advance(self, row: Row, stores: bool, in_run: bool) -> None:
        """A row is asked for."""
        if self.trace is None:
            self.now += 1
            row.next = -self.now
        elif in_run:
            assert self.trace.at(self.now) == (row.index, stores), (
                "a run takes rows in the trace's order"
            )
            self.now += 1
            row.next = self.trace.next_use(row.index, self.now)

    def priority(self, row: Row) -> float | None:
        """How little a row in memory is missed: the time of its next use. None where it must
        stay.
        """
        hazards = self._hazards
        if hazards.is_pinned(row) or row is self.wanted or row.queued:
            return None
        if not hazards.has_memory(row):
            return None
        return NEVER if not row.holds or self.is_dead(row, row.next) else row.next

    def is_dead(self, row: Row, next_use: float) -> bool:
        """Whether nobody will ask for a row's contents: its next use, in this run or the next one,
        replaces them.
        """
        return not row.carries and self.trace is not None and self.trace.at(int(next_use))[1]

    def _locate(self) -> None:
        """Set every row's next use as it is at the beginning of a run."""
        if self.trace is not None:
            for row in self._rows:
                row.next = self.trace.next_use(row.index, self.now)
