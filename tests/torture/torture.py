"""What a kind of torture is."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.torture.application import Workshop


@dataclass(frozen=True)
class Torture:
    """A kind of torture: what it proves, and how."""

    name: str
    promise: str
    trial: Callable[[int, Workshop], str]
    """Does the trial of a case, which decides all that is left to chance in it, and judges it.
    Returns what it did.

    Raises Broken.
    """
    cases: Callable[[Workshop], int] | None = None
    """How many cases there are: 0 to this number; none: any number up to 2**32 is a case."""
