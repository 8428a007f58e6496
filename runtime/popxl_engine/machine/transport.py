"""How members of a group in this process reach those in others: one interface, whatever carries it.

`by_messages` serves any number of replicas in a process, `by_devices` those that have a process and
a device each: NCCL, and Gloo in tests.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from popxl_engine.machine.arrival import Arrival, waits


class Exchange(ABC):
    """One group's collective under way.

    Args:
        arrivals: of the members in this process.
    """

    def __init__(self, arrivals: dict[int, Arrival]):
        self.arrivals = arrivals
        self.done: Future[dict[int, Any]] | None = None
        """The results, where a thread waits for them."""

    @property
    def first(self) -> Arrival:
        """One of the arrivals."""
        return next(iter(self.arrivals.values()))

    @abstractmethod
    def results(self) -> dict[int, Any]:
        """Wait, and combine what has come: results of the members in this process.

        Raises:
            TransferError: another process is gone, or did not answer in time.
        """


class Transport(Protocol):
    """What carries collectives between processes."""

    def begin(self, arrivals: dict[int, Arrival], run: int) -> Exchange:
        """Begin a collective for which all members of this process have arrived. Waits for
        nothing.

        run: which of all runs this is, the same in every process.
        """


def places(exchanges: Sequence[Exchange]) -> str:
    """The places where this process's replicas wait, in words."""
    return waits(
        {
            member: arrival
            for collective in exchanges
            for member, arrival in collective.arrivals.items()
        }
    )
