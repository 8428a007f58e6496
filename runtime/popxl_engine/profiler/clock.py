"""Time stamps of a program: by the host's clock, or on a GPU by events in its stream."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Gives numbers that stand for moments, and afterwards what time it was."""

    def now(self) -> int:
        """A number for this moment."""

    def times(self, moments: Sequence[int]) -> list[int]:
        """The moments in nanoseconds of `time.perf_counter_ns`. Numbers given out before mean
        nothing then.
        """


class HostClock:
    """The host's own."""

    now = staticmethod(time.perf_counter_ns)

    def times(self, moments: Sequence[int]) -> list[int]:
        """See `Clock`."""
        return list(moments)


class EventClock:
    """A GPU's: each moment is an event in the stream of work.

    Args:
        make_event: a new event that is recorded at once.
    """

    def __init__(self, make_event: Callable[[], Any]):
        self._make_event = make_event
        self._events: list[Any] = []
        self._first = 0

    def now(self) -> int:
        """See `Clock`."""
        if not self._events:
            first = self._make_event()
            first.synchronize()
            self._first = time.perf_counter_ns()
            self._events.append(first)
        self._events.append(self._make_event())
        return len(self._events) - 1

    def times(self, moments: Sequence[int]) -> list[int]:
        """See `Clock`. Waits for the device."""
        events, self._events = self._events, []
        if events:
            events[-1].synchronize()
        return [
            self._first + int(1e6 * events[0].elapsed_time(events[moment])) for moment in moments
        ]


def recorded_event() -> "torch.cuda.Event":
    """An event after all that the current GPU has been asked for."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def clock_of(device: torch.device) -> Clock:
    """The clock of a program on a device."""
    return EventClock(recorded_event) if device.type == "cuda" else HostClock()
