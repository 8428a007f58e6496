"""The time since a program began, or a call of it in a process that has others."""

import time


class _Clock:
    begun = time.monotonic()
    """When it began; until that is said, when this was loaded."""


def begin() -> None:
    """Count from now."""
    _Clock.begun = time.monotonic()


def since_start() -> float:
    """Seconds since the program began."""
    return time.monotonic() - _Clock.begun
