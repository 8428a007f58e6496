"""Rows between a store and an arena: which are in memory, which come next, and what must wait for
what.

A rule each says which rows stay (`Replacement`), which are read before they are asked for
(`ReadAhead`), which are written back (`WriteBack`), and how all find room (`Placement`). `Hazards`
has the order that keeps contents right, `Transfers` the threads that read and write.
"""

from collections.abc import Sequence

import torch

from popxl_engine.machine.device import PROCESSOR, Device
from popxl_engine.machine.paging.access_trace import NEVER, AccessTrace
from popxl_engine.machine.paging.arena import Arena
from popxl_engine.machine.paging.hazards import RULES, Hazards
from popxl_engine.machine.paging.placement import Placement
from popxl_engine.machine.paging.read_ahead import ReadAhead
from popxl_engine.machine.paging.replacement import Replacement
from popxl_engine.machine.paging.row import Row
from popxl_engine.machine.paging.store import Store
from popxl_engine.machine.paging.transfers import Transfers
from popxl_engine.machine.paging.write_back import WriteBack


class Cache:
    """The rows of one replica, as its program takes them and gives them back.

    Args:
        trace: the rows of every run in order; without it rows come when they are asked for, and
            those go that were not used for longest.
        look_ahead: fetch rows before they are asked for.
        rules: what keeps contents right, see `Hazards` (tests take one away).
        device: where the arena is.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        arena: Arena,
        store: Store,
        trace: AccessTrace | None = None,
        look_ahead: bool = True,
        rules: frozenset[str] = RULES,
        device: Device = PROCESSOR,
    ):
        trace = trace if trace is not None and len(trace) else None
        self.device = device
        self.transfers = Transfers(store)
        self.hazards = Hazards(rules)
        self.replacement = Replacement(rows, trace, self.hazards)
        self.write_back = WriteBack(self.hazards, self.transfers)
        self.placement = Placement(arena, device, self.replacement, self.write_back, self.hazards)
        self.read_ahead = ReadAhead(
            rows,
            trace if look_ahead else None,
            self.replacement,
            self.placement,
            self.hazards,
            self.transfers,
        )
        self._rows, self._in_run = rows, False
        self.transfers.start(self.read_ahead, self.write_back)

    def begin(self) -> None:
        """A run begins. One that did not end is forgotten."""
        with self.transfers.lock:
            self.replacement.begin()
            self._in_run = True
            self.read_ahead.begin()

    def leave(self) -> None:
        """A run has ended, or been given up."""
        with self.transfers.lock:
            self._in_run = False

    def check(self) -> None:
        """RemoteMemoryError if a transfer has failed."""
        self.transfers.check()

    def borrow(self, row: Row) -> torch.Tensor:
        """Pin a row with its contents in memory; returns its bytes. `release` must follow."""
        with self.transfers.lock:
            self.replacement.advance(row, stores=False, in_run=self._in_run)
            return self._pinned(row, fill=True)

    def borrow_to_fill(self, row: Row) -> torch.Tensor:
        """Pin a row whose contents do not matter, as they are replaced; `filled` must follow."""
        with self.transfers.lock:
            self.replacement.advance(row, stores=True, in_run=self._in_run)
            return self._pinned(row, fill=False)

    def filled(self, row: Row) -> None:
        """A row that was pinned to be filled has its contents."""
        with self.transfers.lock:
            row.holds = row.dirty = True
            self.release(row)

    def release(self, row: Row) -> None:
        """Give a row back."""
        with self.transfers.lock:
            row.pins -= 1
            if not row.pins:
                row.fence = self.device.fence()
                self.transfers.progress.notify_all()
                self.read_ahead.released(row)

    @property
    def is_in_use(self) -> bool:
        """Whether a run goes on, or a tensor borrows a row."""
        with self.transfers.lock:
            return self._in_run or any(row.pins for row in self._rows)

    def park(self) -> None:
        """Put all rows into the store, and give the arena up; not while it is in use, and nothing
        may use it then.

        Raises:
            RemoteMemoryError: a transfer has failed.
        """
        with self.transfers.lock:
            self.read_ahead.stop()
            while any(row.queued for row in self._rows):  # the one that is being read
                self.check()
                self.transfers.wait("waited_for_reads")
            self.placement.empty(self.placement.arena.extents)
            while self.write_back.pending:
                self.check()
                self.transfers.wait("waited_for_writes")
            self.check()
            self.placement.arena = Arena(0, self.device)

    def resume(self, arena: Arena) -> None:
        """Go on after `park` with an arena of the same size."""
        with self.transfers.lock:
            self.placement.arena = arena

    def close(self) -> None:
        """Have the threads end; the last one gives the store up. Waits for nothing."""
        self.transfers.close()

    def _pinned(self, row: Row, fill: bool) -> torch.Tensor:
        """Pin a row, and wait until its memory is there."""
        self.replacement.wanted = row
        try:
            self._bring(row, fill)
        finally:
            self.replacement.wanted, self.placement.is_cramped = None, False
        row.pins += 1
        assert row.memory is not None
        return row.memory

    def _bring(self, row: Row, fill: bool) -> None:
        """Wait until a row's memory is there: with its contents, or free to be filled."""
        hazards, placement, wait = self.hazards, self.placement, self.transfers.wait
        while True:
            self.check()
            if row.memory is None:
                if placement.make_room(row, above=-NEVER):
                    self.read_ahead.look_again()
                elif placement.is_quiet():
                    placement.make_room_apart(row)
                else:
                    wait("waited_for_memory")
                continue
            if row.holds or not (fill or row.queued) and hazards.has_memory(row):
                return
            if fill and not row.queued:
                self.read_ahead.demand(row)
            wait("waited_for_reads" if hazards.can_be_read(row) else "waited_for_writes")
