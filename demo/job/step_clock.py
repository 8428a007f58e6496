"""The time that steps take by the clock, and how much of it they wait for data."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepClock:
    """Seconds of steps: all that passes from the end of a call of the session to the end of the
    next one, but for what is left out.

    Left out is what comes between steps: validation, checkpoints, samples, reports, checks of
    replicas, and building the program of a batch that grows. Waiting for data counts, and so does
    waiting for other processes.
    """

    def __init__(self) -> None:
        self.waited = 0.0
        """Seconds for data since the last call of the session: reading ahead beside a step is no
        waiting."""
        self._begin = time.perf_counter()
        self._left_out, self._depth = 0.0, 0

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """A block that is no part of a step; it may have others inside."""
        begin = time.perf_counter()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._left_out += time.perf_counter() - begin

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A block in which the next step's data are waited for."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.waited += time.perf_counter() - begin

    def take(self) -> "tuple[float, float]":
        """Seconds since this was called last, and those of them that were waited for data; the next
        step begins.
        """
        now = time.perf_counter()
        taken = now - self._begin - self._left_out, self.waited
        self._begin, self._left_out, self.waited = now, 0.0, 0.0
        return taken
