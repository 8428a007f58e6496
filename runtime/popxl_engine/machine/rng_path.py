"""Positions in a run as single numbers, so that random draws depend on where they are made and on
nothing else.

A path is made by folding, from the outside in: the run's number, then for each call, branch or
loop around it the position of that op in its graph (for loops the iteration too), then the position
of the op itself; positions count only ops that draw. A graph with a seed
(`popxl.extensions.round_from`) begins anew: its ops fold from the seed.
"""

from collections.abc import Iterable, Sequence

from popxl.generator import GOLDEN, SPLITMIX_MULTIPLIERS

MASK_64 = 2**64 - 1
RUNS = 0x9BDB62AD7D1F4C25
"""Keeps the paths of runs apart from seeds that programs choose, which are small numbers."""
SEEDS = 0x6A1F93D20C5B74E7
"""Keeps what is drawn from a seed apart from what other ops draw from it, or from seeds that are
split off it.
"""


def enter(path: int, numbers: Iterable[int]) -> int:
    """The path inside another: SplitMix64 of the outer one, plus each number in turn."""
    for number in numbers:
        z = ((path ^ number) + GOLDEN) & MASK_64
        z = ((z ^ (z >> 30)) * SPLITMIX_MULTIPLIERS[0]) & MASK_64
        z = ((z ^ (z >> 27)) * SPLITMIX_MULTIPLIERS[1]) & MASK_64
        path = z ^ (z >> 31)
    return path


def of_run(run: int) -> int:
    """The path of a whole run."""
    return enter(RUNS, (run,))


def of_seed(words: Sequence[int]) -> int:
    """The path of a graph with a seed of two 32-bit words; each seed has its own."""
    high, low = words
    return enter(SEEDS, (int(high) << 32 | int(low),))


def as_seed(path: int) -> tuple[int, int]:
    """A path as the generator's seed: two 32-bit words."""
    return path >> 32, path & 0xFFFFFFFF
