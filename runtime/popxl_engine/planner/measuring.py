"""Speeds of this machine: what a plan is timed with where nothing else is given."""

import time
from typing import Callable

import torch
from popxl.dtypes import dtype, float32
from popxl.plan import Machine

from popxl_engine.kernels.dtypes import torch_dtype
from popxl_engine.kernels.linalg import product

WIDTHS = (512, 1024, 2048)
"""Of the products' matrices: large enough to keep every core busy, small enough to be done in a
moment.
"""
COPIED_BYTES = 1 << 26
SECONDS = 0.25
"""How long each speed is measured."""


def measure(data_type: dtype = float32) -> Machine:
    """See `popxl.planning.measure`.

    Replicas of one process share memory: a link is a copy. Remote rows are used where they lie:
    what a copy reads and what it writes both count.
    """
    flops = max(_products(width, torch_dtype(data_type)) for width in WIDTHS)
    source, target = (
        torch.ones(COPIED_BYTES, dtype=torch.uint8),
        torch.ones(COPIED_BYTES, dtype=torch.uint8),
    )
    copies = _per_second(lambda: target.copy_(source))
    return Machine(flops=flops, link=copies * COPIED_BYTES, remote=2 * copies * COPIED_BYTES)


def _products(width: int, data_type: torch.dtype) -> float:
    """FLOP/s of products of square matrices."""
    lhs, rhs = (torch.ones(width, width, dtype=data_type) for _ in range(2))
    return 2 * width**3 * _per_second(lambda: product(lhs, rhs, data_type))


def _per_second(work: Callable[[], object]) -> float:
    """How often the fastest of many goes would fit into a second."""
    work()
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return 1 / best
