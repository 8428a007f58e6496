"""Speeds of this machine: what a plan is timed with where nothing else is given."""

import os
import time
from collections.abc import Callable

import torch
from popxl.dtypes import dtype, float32
from popxl.plan import Machine

from popxl_engine.kernels.dtypes import torch_dtype
from popxl_engine.kernels.linalg import product
from popxl_engine.machine.device import device_named
from popxl_engine.native import library

WIDTHS = (512, 1024, 2048)
"""Of the products' matrices: large enough to keep every core busy, small enough to be done in a
moment.
"""
COPIED_BYTES = 1 << 26
READ_BYTES = 1 << 28
"""More than caches hold."""
REPEATS = 64
"""Of a loop that multiplies: a millisecond or so."""
SECONDS = 0.25
"""How long each speed is measured."""


def measure(data_type: dtype = float32) -> Machine:
    """See `popxl.planning.measure`.

    Products are bounded by the CPU's units that multiply, whatever program feeds them. Replicas of
    one process share memory: a link is a copy. Remote rows are used where they lie: what a copy
    reads and what it writes both count.
    """
    kind = torch_dtype(data_type)
    flops = multiply_rate(kind, from_cache=False)
    copied = copy_rate()
    if not flops:  # no compiler: the best that is seen
        flops = max(product_rate(width, kind) for width in WIDTHS)
    return Machine(flops=flops, link=copied, remote=2 * copied)


def multiply_ceiling(data_type: dtype, device: str, seconds: float) -> float:
    """See `popxl.planning.multiply_ceiling`."""
    if device_named(device).where.type != "cpu":
        return 0.0
    return multiply_rate(torch_dtype(data_type), from_cache=False, seconds=seconds)


def multiply_rate(data_type: torch.dtype, *, from_cache: bool, seconds: float = SECONDS) -> float:
    """FLOP/s of a loop that does nothing but multiply and add, over PyTorch's threads, as if each
    had a core to itself; 0 without the compiled library.

    Args:
        from_cache: a panel of the right operand comes from the second cache, and the left one from
            the first; else both stay in registers.
        seconds: how long it is measured.
    """
    if library.library() is None:
        return 0.0
    if data_type != torch.bfloat16 or not library.has_tiles():
        data_type = torch.float32
    numbers = second_cache() // 2 // data_type.itemsize
    threads = torch.get_num_threads()
    panels = torch.ones(threads * numbers, dtype=data_type)
    found = torch.zeros(2, dtype=torch.float64)

    def multiply(repeats: int) -> float:
        """How often threads could do so in a second, by the time that each has a core."""
        library.call(
            "multiply_ceiling", (data_type,), panels, numbers, repeats, int(from_cache), found
        )
        return found[1].item()

    multiply(1)
    in_repeat = 2 * found[0].item() / threads  # of ones, sums count
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        best = max(best, multiply(REPEATS))
    return in_repeat * REPEATS * best


def second_cache() -> int:
    """Bytes of a core's second cache."""
    found = 0
    if "SC_LEVEL2_CACHE_SIZE" in os.sysconf_names:
        found = os.sysconf("SC_LEVEL2_CACHE_SIZE")
    return found if found > 0 else 1 << 20


def read_rate() -> float:
    """Bytes/s that PyTorch's threads read from memory at most; 0 without the compiled library."""
    if library.library() is None:
        return 0.0
    numbers = torch.ones(READ_BYTES // 4, dtype=torch.float32)
    done = torch.zeros((), dtype=torch.float64)
    reads = _per_second(lambda: library.call("read_ceiling", (), numbers, numbers.numel(), done))
    return reads * READ_BYTES


def copy_rate() -> float:
    """Bytes/s that PyTorch's threads copy: read, and written as many."""
    source, target = (torch.ones(COPIED_BYTES, dtype=torch.uint8) for _ in range(2))
    return COPIED_BYTES * _per_second(lambda: target.copy_(source))


def product_rate(width: int, data_type: torch.dtype) -> float:
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
