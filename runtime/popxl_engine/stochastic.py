"""Stochastic rounding of one op's update: the seed is the op's place in the run."""

from typing import ContextManager

import torch

from popxl_engine.kernels.rounding import Updates
from popxl_engine.machine.place import as_seed


def rounded(place: int, start: int = 0) -> ContextManager[None]:
    """Inside, updates of 16-bit tensors are rounded stochastically.

    Args:
        place: of the op, as `machine.place` numbers it.
        start: index of the updated tensor's first element in the unsharded tensor.
    """
    seed = torch.tensor(as_seed(place), dtype=torch.uint32)
    return Updates.rounded_stochastically(lambda: seed, start)
