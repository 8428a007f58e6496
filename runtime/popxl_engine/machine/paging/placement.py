"""The places of rows in memory of a fixed size."""

from collections.abc import Sequence

from popxl.errors import RemoteMemoryError

from popxl_engine.machine.device import Device
from popxl_engine.machine.paging.arena import Arena, Extent, Window, until_now
from popxl_engine.machine.paging.hazards import Hazards
from popxl_engine.machine.paging.replacement import Replacement
from popxl_engine.machine.paging.row import Before, Row, Transfer
from popxl_engine.machine.paging.write_back import WriteBack


class Placement:
    """Rows together never take more than the arena: one comes in place of others, which leave.

    Args:
        device: where the arena is.
    """

    def __init__(
        self,
        arena: Arena,
        device: Device,
        replacement: Replacement,
        write_back: WriteBack,
        hazards: Hazards,
    ):
        self.arena, self.device = arena, device
        self.is_cramped = False
        """Whether the program waits because rows in use leave no memory in one piece."""
        self._replacement, self._write_back, self._hazards = replacement, write_back, hazards

    def make_room(self, row: Row, above: float) -> bool:
        """Give a row memory, of rows that are used after a time. False where there are none."""
        window = self.arena.find(row.size, self._replacement.priority, above)
        if window is not None:
            self.move_in(row, window)
        return window is not None

    def move_in(self, row: Row, window: Window) -> None:
        """Give a row memory in place of others."""
        after: list[Before] = []
        for extent in self.arena.extents[slice(*window)]:
            after += extent.after if extent.row is None else self._evict(extent.row)
        row.holds, row.after = False, [one for one in after if not one.is_done]
        row.memory = self.arena.allocate(window, row.size, row, row.after)

    def make_room_apart(self, row: Row) -> None:
        """Give a row memory beside the arena, for pieces of it that go back to the system
        meanwhile.

        Where rows that are in use leave enough memory, but not in one piece. All others leave
        first; while they are being written, this does nothing more, and is to be called again.

        Raises:
            RemoteMemoryError: there is not enough.
        """
        priority = self._replacement.priority
        free = [e for e in self.arena.extents if e.row is None or priority(e.row) is not None]
        if sum(extent.size for extent in free) < row.size:
            pinned = sum(r.size for r in self._rows() if r.pins)
            raise RemoteMemoryError(
                f"remote memory: got {sum(e.size for e in self.arena.extents)} bytes for rows on "
                f"{self.device.where}, of which {pinned} are in use, for a row of {row.size}; "
                "expected room for it. Give rows more memory."
            )
        self.empty(free)
        self.is_cramped = True
        if self._write_back.pending:
            return
        pieces = self.arena.pieces(free, row.size)
        for extent in pieces:
            for one in extent.after:
                if not isinstance(one, Transfer):
                    one.wait()
            extent.after = []
            self.arena.decommit(extent)
        row.memory = self.device.memory(row.size).bytes
        row.is_apart, row.holds, row.after = True, False, until_now(self.device)
        for extent in pieces:
            extent.row = row

    def empty(self, extents: Sequence[Extent]) -> None:
        """Have the rows of some extents go out of memory."""
        for extent in extents:
            if extent.row is not None and extent.row.memory is not None:
                before = self._evict(extent.row)
                extent.row, extent.after = None, before

    def is_quiet(self) -> bool:
        """Whether nothing is being moved that would make room."""
        return not self._write_back.pending and all(
            not r.queued and self._hazards.has_memory(r) for r in self._rows()
        )

    def _evict(self, row: Row) -> list[Before]:
        """A row goes out of memory. Returns what must be done before that is used again."""
        before = row.after if row.fence is None else [*row.after, row.fence]
        if row.dirty and row.holds and not self._replacement.is_dead(row, row.next):
            before = [*before, self._write_back.write(row)]
        if row.is_apart:
            for extent in self.arena.extents:
                if extent.row is row:
                    extent.row, extent.after = None, before
        row.memory, row.is_apart, row.holds, row.dirty, row.fence, row.after = (
            None,
            False,
            False,
            False,
            None,
            [],
        )
        return before

    def _rows(self) -> list[Row]:
        """The rows in memory."""
        return list({id(e.row): e.row for e in self.arena.extents if e.row is not None}.values())
