"""The place where replicas meet for a collective, and what each brings there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Reduction(Protocol):
    """How the members' operands, or the same elements of each, become one."""

    def __call__(self, ts: Sequence[Any], /) -> Any:
        """The operands as one."""

    def room(self, like: Any, /) -> Any:
        """Memory for the result of operands like this one."""


@dataclass(eq=False)
class Arrival:
    """One replica's arrival at a collective.

    members: replicas of its group, in group order. operands: this replica's operands. combine: the
    kernel, ``(list of each operand over the members) -> list of the members' results``. apart: the
    same as one member sees it, ``(seat or communicator, operand) -> result``. site: which op of the
    program this is. site_index: that of the site, the same in every process. reads: what a member's
    result depends on, see `Reads`. pair: two operands as one, for a reduction whose operand the
    replica has given up, so that ``operands``, a list, alone holds it; see `TreeReduction`.
    reduce: for reductions.
    goes_on: the replica does not wait here, but where it yields the `lockstep.Meeting` it gets.
    """

    site: Any
    members: tuple[int, ...]
    operands: Sequence[Any]
    combine: Callable[..., Sequence[Any]]
    apart: Callable[..., Any]
    describe: str
    site_index: int = 0
    reads: str = "all"
    pair: Callable[[Any, Any], Any] | None = None
    goes_on: bool = False
    reduce: Reduction | None = None


Reads = ("all", "elements", "shard", "own")
"""What of the members' operands member i's result depends on: everything; for each element the same
elements, alike for all members; the i-th of as many flat pieces as there are members; only its own
operand, so that it waits for nobody."""


def waits(waiting: dict[int, Arrival]) -> str:
    """The place where each replica waits, in words."""
    return "; ".join(
        f"replica {r} waits at {a.describe} for replicas {list(a.members)}"
        for r, a in sorted(waiting.items())
    )
