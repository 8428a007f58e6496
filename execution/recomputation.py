"""What decoder blocks keep of their forward pass for the gradient, and what they compute again.

A price, in operations for a byte, says it of a block: what costs more to compute again is kept. At
few prices blocks keep something else: these are the levels. A budget buys the levels of all blocks
that leave the fewest operations.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from popxl_gpt.utils.units import bytes_text, counted

ALL_AGAIN, NONE_AGAIN = math.inf, -math.inf
"""The prices at which blocks keep nothing, and all that their gradients take."""
CHEAP = 10.0
"""Operations that no block is spared for a byte, unless it keeps all: in the time in which a byte
goes to memory and comes back, all processors do more.
"""


@dataclass(frozen=True)
class Level:
    """What a block keeps at a price."""

    price: float
    """Operations for a byte: what costs no more is computed again."""
    kept_bytes: int
    """Bytes of what a block keeps, of a group of micro-batches."""
    flops: float
    """Operations of a block's backward pass over a run of micro-batches, on average."""
    again: tuple[str, ...]
    """Linear layers whose products are computed again."""

    @property
    def words(self) -> str:
        """What it means, for people."""
        if self.price == NONE_AGAIN:
            return "all"
        if self.kept_bytes == 0:
            return "nothing"
        again = f" but those of {' and '.join(self.again)}" if self.again else ""
        return f"products{again}"


@dataclass(frozen=True)
class Stretch:
    """Blocks, one after the other, of one level."""

    layers: range
    level: Level


def bought(levels: Sequence[Level], layers: int, budget: int) -> tuple[Stretch, ...]:
    """The levels of so many blocks that leave the fewest operations, of those whose bytes are
    within a budget: one level for all, or two, of which the last blocks have the one that keeps
    more.

    The last ones, for the backward pass begins there: they have given the memory up again when most
    gradients wait for the update.

    Args:
        levels: from the one that keeps nothing on.
    """
    found: list[tuple[float, int, tuple[Stretch, ...]]] = []
    for less, more in combinations(sorted(levels, key=lambda level: level.kept_bytes), 2):
        step, left = more.kept_bytes - less.kept_bytes, budget - layers * less.kept_bytes
        if left < 0 or step == 0:
            continue
        last = min(layers, left // step)
        parts = Stretch(range(layers - last), less), Stretch(range(layers - last, layers), more)
        flops = (layers - last) * less.flops + last * more.flops
        taken = layers * less.kept_bytes + last * step
        found.append((flops, taken, tuple(part for part in parts if part.layers)))
    return min(found, key=lambda choice: choice[:2])[-1]


def stretches_text(stretches: Sequence[Stretch]) -> str:
    """How many blocks keep what."""
    return "; ".join(
        f"{counted(len(each.layers), 'block')} {'keeps' if len(each.layers) == 1 else 'keep'} "
        f"{each.level.words}"
        + (f", {bytes_text(each.level.kept_bytes)} each" if each.level.kept_bytes else "")
        for each in stretches
    )
