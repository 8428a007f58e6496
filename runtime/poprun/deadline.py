"""Limits of waiting that count only the time in which this process can run.

A job that is suspended as a whole (by a batch system, a paused container or a frozen cgroup) goes
on where it was: those that it waits for have stood still, too.
"""

import time

SLICE_SECONDS = 1.0
"""Who waits for longer asks again after so long."""
LONGEST_SECONDS = 2.0
"""More than this between two questions means that the process was stopped."""


class Deadline:
    """Ends after so many seconds, of those between two questions at most `LONGEST_SECONDS`."""

    def __init__(self, seconds: float):
        self._left, self._asked = seconds, time.monotonic()

    def left(self) -> float:
        """Seconds that are left: none at 0 or below."""
        now = time.monotonic()
        self._left -= min(now - self._asked, LONGEST_SECONDS)
        self._asked = now
        return self._left
