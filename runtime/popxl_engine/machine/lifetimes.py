"""When the contents of remote rows are over, so that they need no memory until they are written
again.

A row's contents are over once nobody asks for them:

- `written_first`: a run writes the row before it reads it, so that nothing passes from one run to
  the next;
- `replaced`: the row's next use, in this run or the next one, is a store;
- `readable`: what may be read between runs lasts until the next one begins.

Tests take each rule away and must fail.
"""

from collections.abc import Sequence, Set

from popxl_engine.machine.paging.paged_buffer import RowId

RULES = frozenset({"written_first", "replaced", "readable"})


class Lifetimes:
    """What a run need not keep of its rows.

    Args:
        events: the rows that every run takes, in order, and whether it stores.
        readable: rows that may be read between runs.
        rules: what keeps contents (tests take one away).
    """

    def __init__(
        self,
        events: Sequence[tuple[RowId, bool]],
        readable: Set[RowId],
        rules: frozenset[str] = RULES,
    ):
        first: dict[RowId, bool] = {}
        for row, stores in events:
            first.setdefault(row, stores)
        self.over_before = [
            row for row, stores in first.items() if stores or "written_first" not in rules
        ]
        """Rows whose contents are over when a run begins."""
        passing = {
            row for row in self.over_before if row not in readable or "readable" not in rules
        }
        self.over_after: dict[int, RowId] = {}
        """Rows whose contents are over after so many events of a run, the last of which takes that
        row.
        """
        coming = first  # whether a row's next use, in this run or the next one, is a store
        for time in range(len(events), 0, -1):
            row, stores = events[time - 1]
            if row in passing and (coming[row] or "replaced" not in rules):
                self.over_after[time] = row
            coming[row] = stores
