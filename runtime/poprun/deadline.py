"""Limits of waiting that count only the time in which this process can run.

A job that is suspended as a whole (by a batch system, a paused container or a frozen cgroup) goes
on where it was: those that it waits for have stood still, too. All waits of the launcher and
between instances have such a limit, and ask it in slices. Who waits within another's limit hands
that on: one that nobody asks for long counts too little.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

SLICE_SECONDS = 1.0
"""Seconds after which who waits for longer asks again."""
LONGEST_SECONDS = 2.0
"""More than this between two questions means that the process was stopped."""


class Deadline:
    """Ends after so many seconds, of those between two questions at most `LONGEST_SECONDS`. For one
    thread.

    Args:
        within: another, with which this one ends, too.
    """

    def __init__(self, seconds: float, within: "Deadline | None" = None):
        self.seconds = seconds
        self._left, self._within, self._asked = seconds, within, time.monotonic()

    def left(self) -> float:
        """Seconds that are left: none at 0 or below."""
        now = time.monotonic()
        self._left -= min(now - self._asked, LONGEST_SECONDS)
        self._asked = now
        return self._left if self._within is None else min(self._left, self._within.left())

    def slice(self) -> float:
        """How long to wait before the next question. TimeoutError: no time is left."""
        left = self.left()
        if left <= 0:
            raise TimeoutError("timed out")
        return min(left, SLICE_SECONDS)

    def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """What a function returns that waits in one piece, such as for the address of a host. A
        thread of its own calls it. TimeoutError: not in time; the thread is left behind.
        """
        found: Future[T] = Future()

        def call() -> None:
            try:
                found.set_result(work(*arguments))
            except BaseException as error:
                found.set_exception(error)

        thread = threading.Thread(target=call, name="work", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(self.slice())
        return found.result()


def join(thread: threading.Thread, seconds: float) -> None:
    """Wait for a thread to end, at most so long."""
    deadline = Deadline(seconds)
    while thread.is_alive() and (left := deadline.left()) > 0:
        thread.join(min(left, SLICE_SECONDS))
