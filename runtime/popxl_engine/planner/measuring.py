"""Speeds of this machine: what a plan is timed with where nothing else is given."""

import time
from typing import Callable

import torch
from popxl.plan import Machine

from popxl_engine.kernels.linalg import matrix_product

WIDTH = 1024
"""Of the product's matrices: large enough to keep every core busy, small enough to be done in a moment."""
COPIED_BYTES = 1 << 26
SECONDS = 0.25
"""How long each speed is measured."""


def measure() -> Machine:
    """See `popxl.plan.measure`. Replicas of one process share memory: a link is a copy, and so is a remote row."""
    lhs, rhs = torch.ones(WIDTH, WIDTH), torch.ones(WIDTH, WIDTH)
    source, target = torch.ones(COPIED_BYTES, dtype=torch.uint8), torch.ones(COPIED_BYTES, dtype=torch.uint8)
    products = _per_second(lambda: matrix_product(lhs, rhs))
    copies = _per_second(lambda: target.copy_(source))
    return Machine(flops=products * 2 * WIDTH**3, link=copies * COPIED_BYTES, remote=copies * COPIED_BYTES)


def _per_second(work: Callable[[], object]) -> float:
    """How often the fastest of many goes would fit into a second."""
    work()
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return 1 / best
