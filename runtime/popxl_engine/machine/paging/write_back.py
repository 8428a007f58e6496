"""The changes of rows that leave memory, on their way to the store."""

from collections import deque

from popxl_engine.machine.paging.hazards import Hazards
from popxl_engine.machine.paging.row import Row, Transfer
from popxl_engine.machine.paging.transfers import Transfers


class WriteBack:
    """A changed row is written once it leaves, in the order in which rows leave."""

    def __init__(self, hazards: Hazards, transfers: Transfers):
        self.pending: deque[Transfer] = deque()
        """The writes that are not done; the first one may be under way."""
        self._hazards, self._transfers = hazards, transfers

    def write(self, row: Row) -> Transfer:
        """Have a row's contents written."""
        assert row.memory is not None
        row.last = Transfer(row, row.memory, self._hazards.fences_of_contents(row))
        self.pending.append(row.last)
        self._transfers.wake("write")
        return row.last

    def next(self) -> Transfer | None:
        """See `Queue`."""
        return self.pending[0] if self.pending else None

    def finish(self, transfer: Transfer) -> None:
        """See `Queue`. A read may have waited for it."""
        self.pending.popleft()
        self._transfers.wake("read")
