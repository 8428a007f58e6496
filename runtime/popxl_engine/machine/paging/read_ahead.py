"""The reads of rows, most of them before the program asks for the row."""

from collections import deque
from collections.abc import Sequence

from popxl_engine.machine.paging.access_trace import NEVER, AccessTrace
from popxl_engine.machine.paging.hazards import Hazards
from popxl_engine.machine.paging.placement import Placement
from popxl_engine.machine.paging.replacement import Replacement
from popxl_engine.machine.paging.row import Row, Transfer
from popxl_engine.machine.paging.transfers import Transfers

MARGIN = 2
"""Looking ahead leaves in memory what moves in the time before, up to one part in so many of the
memory: else, with a trace that goes round, the row that is missed least is the one used last, and
nothing could be fetched before it is.
"""


class ReadAhead:
    """Rows are read in the program's order, as far ahead as there are rows to give up: those whose
    next use is farthest as seen from where the other one is needed (Cao et al. 1995).

    Args:
        trace: None to read only what the program asks for.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        trace: AccessTrace | None,
        replacement: Replacement,
        placement: Placement,
        hazards: Hazards,
        transfers: Transfers,
    ):
        self.time = 0
        """The time of the event that is looked at next."""
        self.moved = 0.0
        """Bytes that the trace moves before that time."""
        self.margin = sum(e.size for e in placement.arena.extents) // MARGIN
        self._rows, self._trace, self._is_on = rows, trace, False
        self._replacement, self._placement = replacement, placement
        self._hazards, self._transfers = hazards, transfers
        self._queue: deque[Row] = deque()
        self._stalled_by: Row | None = None
        """The row that must be given back before it can go on."""
        self._is_short = False
        """Whether it goes on with any row that is given back, as there is little memory."""

    def look_again(self) -> None:
        """Look ahead from where the program is: rows may have gone that are needed soon."""
        self.time, self._stalled_by = self._replacement.now, None
        self._transfers.wake("read")

    def begin(self) -> None:
        """A run begins."""
        self._is_on = True
        self.look_again()

    def stop(self) -> None:
        """Read no more than the row that is being read, until a run begins."""
        self._is_on = False
        for row in self._queue:
            row.queued = False
        self._queue.clear()

    def demand(self, row: Row) -> None:
        """Read a row before all others."""
        row.queued = True
        self._queue.appendleft(row)
        self._transfers.wake("read")

    def released(self, row: Row) -> None:
        """A row was given back."""
        if self._stalled_by is row or self._is_short and self._is_free(row):
            self._transfers.wake("read")

    def next(self) -> Transfer | None:
        """See `Queue`. Looks ahead first."""
        self._look_ahead()
        for row in self._queue:
            if self._hazards.can_be_read(row):
                self._queue.remove(row)
                assert row.memory is not None
                return Transfer(row, row.memory, self._hazards.fences_of_memory(row))
        return None

    def finish(self, transfer: Transfer) -> None:
        """See `Queue`."""
        row = transfer.row
        row.queued, row.holds, row.dirty = False, True, False

    def priority(self, row: Row) -> float | None:
        """How little a row is missed once the program is where it is looked ahead to. None where it
        was used last.
        """
        assert self._trace is not None
        if not row.seen <= self.time <= row.later:
            row.seen, row.later = self.time, self._trace.next_use(row.index, self.time)
            row.passed = self._trace.moved_until(self._trace.last_use(row.index, self.time))
        if self.moved - row.passed < self.margin:
            return None
        return NEVER if self._replacement.is_dead(row, row.later) else row.later

    def _is_free(self, row: Row) -> bool:
        """Whether a row has been used for the last time before where it is looked ahead to."""
        return self._replacement.priority(row) is not None and row.next > self.time

    def _look_ahead(self) -> None:
        """Give memory to the rows that come next, in order, and queue those whose contents are
        needed.
        """
        if self._trace is None or not self._is_on:
            return
        if self._placement.is_cramped or self._transfers.failure is not None:
            return
        now = self._replacement.now
        if self.time < now:
            self.time, self._stalled_by = now, None
        if self._stalled_by is not None and not self._is_free(self._stalled_by):
            return
        while self.time < now + len(self._trace):
            index, stores = self._trace.at(self.time)
            row = self._rows[index]
            if row.memory is None:
                if not self._make_room(row):
                    return
                if not stores:
                    row.queued = True
                    self._queue.append(row)
            self.time += 1

    def _make_room(self, row: Row) -> bool:
        """Give memory to the row that is looked ahead to. False where others are to be used
        first.
        """
        assert self._trace is not None
        self.moved = self._trace.moved_until(self.time)
        extents = self._placement.arena.extents
        window = self._placement.arena.find(row.size, self.priority, self.time)
        self._is_short = window is None
        if window is None:  # what is free now, though it may be missed sooner than others
            self._stalled_by = None
            return self._placement.make_room(row, self.time)
        inside = [extent.row for extent in extents[slice(*window)] if extent.row is not None]
        self._stalled_by = next((other for other in inside if not self._is_free(other)), None)
        if self._stalled_by is None:
            self._placement.move_in(row, window)
        return self._stalled_by is None
