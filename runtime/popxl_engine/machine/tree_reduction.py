"""A reduction that begins before all of its operands are there, so that few of them are held at a
time.

Replicas of one process come to a collective one after the other. Their operands are the leaves of a
binary tree over positions; two nodes that stand beside each other become one, and are let go of. So
of R operands of B bytes about log2(R) + 2 times B is held, and not R + 1 times.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

FOLDED_BYTES = 2**24
"""Operands from this size on are folded. Smaller ones wait for each other: together they are
reduced faster.
"""

Node = tuple[int, int]
"""Level, from the leaves up, and position in it."""


class TreeReduction:
    """One collective's operands, as far as they have come. Its length is their number.

    Args:
        pair: two neighbours as one.
    """

    def __init__(self, size: int, pair: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]):
        self._size, self._pair = size, pair
        self._nodes: dict[Node, torch.Tensor] = {}

    def __len__(self) -> int:
        return self._size

    def add(self, position: int, operands: Any) -> None:
        """Take a member's operand out of a list."""
        self.dtype = operands[0].dtype
        node = (0, position)
        self._nodes[node] = operands.pop()
        width = self._size
        while width > 1:
            level, position = node
            left, right = (level, position & ~1), (level, position | 1)
            if right[1] < width:
                if left not in self._nodes or right not in self._nodes:
                    return
                value = self._pair(self._nodes.pop(left), self._nodes.pop(right))
            else:
                value = self._nodes.pop(left)
            node, width = (level + 1, position // 2), -(-width // 2)
            self._nodes[node] = value
            del value

    @property
    def whole(self) -> torch.Tensor:
        """The root, once all operands are there."""
        (found,) = self._nodes.values()
        return found


def is_tree_reduced(operands: Sequence[torch.Tensor]) -> bool:
    """Whether an operand is large enough."""
    return operands[0].nbytes >= FOLDED_BYTES
