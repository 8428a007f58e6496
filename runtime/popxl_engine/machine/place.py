"""Places in a run as single numbers, so that random draws depend on where they are made and on nothing else.

A place is made by folding, from the outside in: the run's number, then for each call, branch or loop around it the
position of that op in its graph (for loops the iteration too), then the position of the op itself; positions count
only ops that draw.
"""

from typing import Iterable, Tuple

from popxl.generator import GOLDEN, SPLITMIX_MULTIPLIERS

MASK = 2**64 - 1
RUNS = 0x9BDB62AD7D1F4C25
"""Keeps the places of runs apart from seeds that programs choose, which are small numbers."""


def enter(place: int, numbers: Iterable[int]) -> int:
    """The place inside another: SplitMix64 of the outer one, plus each number in turn."""
    for number in numbers:
        z = ((place ^ number) + GOLDEN) & MASK
        z = ((z ^ (z >> 30)) * SPLITMIX_MULTIPLIERS[0]) & MASK
        z = ((z ^ (z >> 27)) * SPLITMIX_MULTIPLIERS[1]) & MASK
        place = z ^ (z >> 31)
    return place


def of_run(run: int) -> int:
    """The place of a whole run."""
    return enter(RUNS, (run,))


def as_seed(place: int) -> Tuple[int, int]:
    """A place as the generator's seed: two 32-bit words."""
    return place >> 32, place & 0xFFFFFFFF
