"""Stochastic rounding of updates: which ops draw, and from which seed."""

from contextlib import AbstractContextManager

import numpy as np
import torch
from popxl import dtypes
from popxl.graph import Graph
from popxl.opdef import Op

from popxl_engine.kernels.rounding import Updates
from popxl_engine.machine.rng_path import as_seed

HALF_DTYPES = (dtypes.float16, dtypes.bfloat16)
UNROUNDED_EFFECTS = frozenset({"collective", "remote", "host", "clock"})
"""Effects of ops that write what they received, unrounded."""


def rounded(*updates: tuple[int, int]) -> AbstractContextManager[None]:
    """A block in which an op's updates of 16-bit tensors are rounded stochastically.

    Args:
        updates: for each tensor that it updates, in the order in which it draws: the path of the
            op that the user wrote, as `machine.rng_path` numbers it, and the index of the tensor's
            first element in the unsharded one.
    """
    seeds = (
        (torch.from_numpy(np.array(as_seed(path), np.uint32)), start) for path, start in updates
    )
    return Updates.drawing(lambda: next(seeds))


class Positions:
    """Positions of ops in their graphs, counting only ops that draw and calls of graphs with such
    ops.

    So a program draws the same with a collective more or less, in the interpreter, and after fusion
    and dead code.
    """

    def __init__(self) -> None:
        self._positions: dict[Graph, dict[Op, int]] = {}

    def of(self, op: Op) -> int:
        """An op's position; 0 for ops that do not draw."""
        return self._in(op.graph).get(op, 0)

    def _in(self, graph: Graph) -> dict[Op, int]:
        if graph not in self._positions:
            drawing = [op for op in graph.ops if self.draws(op)]
            self._positions[graph] = {op: i for i, op in enumerate(drawing)}
        return self._positions[graph]

    def draws(self, op: Op) -> bool:
        """Whether an op rounds what it updates, or calls a graph where one does."""
        if op.called():
            return any(self._in(graph) for graph, _ in op.called())
        if op.definition.effects & UNROUNDED_EFFECTS:
            return False
        return op.definition.rounds or any(t.dtype in HALF_DTYPES for t in op.written)
