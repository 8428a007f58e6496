"""The time of a run by laps: what a program does from one `begin_lap` to the next."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol


class LapClock(Protocol):
    """A clock whose moments become times afterwards, such as a GPU's."""

    def now(self) -> int:
        """A number for this moment."""

    def times(self, moments: Sequence[int]) -> list[int]:
        """The moments in nanoseconds."""


class Laps:
    """The laps of the replicas of this process, which take turns: at every moment one of them runs.

    Args:
        clock: of the device.
        rows_waited: seconds so far for which the program waited for rows of remote memory.
    """

    def __init__(self, clock: LapClock, rows_waited: Callable[[], float]):
        self._clock, self._rows_waited = clock, rows_waited
        self._of_replicas: dict[int, str] = {}
        """The lap that each replica is in."""
        self._labels: list[str] = []
        self._moments: list[int] = []
        """Laps in the order in which they began, and when."""
        self._times: list[int] = []
        """The same in nanoseconds, once they are asked for."""
        self.waited_for_rows = self.waited_for_others = 0.0
        """Seconds of the last run, within its laps."""

    @contextmanager
    def run(self) -> Iterator[None]:
        """A block around a run."""
        if self._moments:  # of a run that nobody asked about
            self._clock.times(())
        self._of_replicas, self._labels, self._moments = {}, [], []
        self.waited_for_others, before = 0.0, self._rows_waited()
        yield
        self._begin("")
        self.waited_for_rows = self._rows_waited() - before

    def begin(self, replica: int, label: str) -> None:
        """Let a replica, which runs now, begin a lap."""
        self._of_replicas[replica] = label
        self._begin(label)

    def resume(self, replica: int) -> None:
        """Go on with the lap of a replica whose turn it is."""
        self._begin(self._of_replicas.get(replica, ""))

    @contextmanager
    def waiting_for_others(self) -> Iterator[None]:
        """A block in which replicas of other processes are waited for."""
        begin = time.perf_counter()
        yield
        self.waited_for_others += time.perf_counter() - begin

    def _begin(self, label: str) -> None:
        if not self._labels or self._labels[-1] != label:
            self._labels.append(label)
            self._moments.append(self._clock.now())

    def seconds(self) -> dict[str, float]:
        """The time of the last run in each lap. What was before the first one is in none."""
        if self._moments:  # an event of a GPU is asked once
            self._times, self._moments = self._clock.times(self._moments), []
        times, found = self._times, dict[str, float]()
        for label, begin, end in zip(self._labels, times, times[1:]):
            if label:
                found[label] = found.get(label, 0.0) + (end - begin) / 1e9
        return found
