"""The order that keeps the contents of rows right, whatever stays, comes and goes."""

from popxl_engine.machine.device import Fence
from popxl_engine.machine.paging.row import Row, Transfer

RULES = frozenset({"reads_wait", "pins", "memory_waits", "fences"})


class Hazards:
    """The four rules of that order. Tests take each away and must fail.

    - `reads_wait`: a row is not read from the store before what it had in memory is written there.
    - `pins`: a row stays where it is while a tensor borrows it.
    - `memory_waits`: memory is not used again before what was in it is written.
    - `fences`: nothing is read into memory, or written from it, before the device has done what it
      was asked to do there. What the program asks for itself needs no such wait, as the device
      keeps that order.

    Args:
        rules: those that hold.
    """

    def __init__(self, rules: frozenset[str] = RULES):
        self._reads_wait, self._pins = "reads_wait" in rules, "pins" in rules
        self._memory_waits, self._fences = "memory_waits" in rules, "fences" in rules

    def is_pinned(self, row: Row) -> bool:
        """Whether a tensor borrows a row."""
        return row.pins > 0 and self._pins

    def has_memory(self, row: Row) -> bool:
        """Whether what was in a row's memory before is written."""
        if row.after:
            row.after = [one for one in row.after if not one.is_done]
        return not self._memory_waits or not any(isinstance(one, Transfer) for one in row.after)

    def can_be_read(self, row: Row) -> bool:
        """Whether a row may be read, but for what the device still does with its memory."""
        is_written = row.last is None or row.last.is_done or not self._reads_wait
        return is_written and self.has_memory(row)

    def fences_of_memory(self, row: Row) -> list[Fence]:
        """What the device does with a row's memory before the row is read into it."""
        return [one for one in row.after if not isinstance(one, Transfer)] if self._fences else []

    def fences_of_contents(self, row: Row) -> list[Fence]:
        """What the device does with a row before its contents are complete."""
        return [row.fence] if row.fence is not None and self._fences else []
