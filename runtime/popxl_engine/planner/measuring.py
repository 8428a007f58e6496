"""Speeds of this machine: what a plan is timed with where nothing else is given."""

import os
import threading
import time
from collections.abc import Callable

import torch
from popxl.dtypes import dtype, float32
from popxl.plan import Machine

from popxl_engine.kernels.dtypes import torch_dtype
from popxl_engine.kernels.linalg import product
from popxl_engine.machine.device import PROCESSOR, Device, device_named
from popxl_engine.machine.paging.host import HostStore
from popxl_engine.native import library

WIDTHS = (512, 1024, 2048)
"""Widths of the products' matrices: large enough to keep every core busy, small enough to be done
in a moment.
"""
GPU_WIDTHS = (4096, 8192)
"""The same for a GPU's."""
AT_ONCE = 8
"""Products or copies that a GPU is asked for before it is waited for."""
COPIED_BYTES = 1 << 26
READ_BYTES = 1 << 28
"""More than caches hold."""
REPEATS = 64
"""Repeats of a loop that multiplies: a millisecond or so."""
SECONDS = 0.25
"""How long each speed is measured."""


def measure(data_type: dtype = float32, device: str = "cpu") -> Machine:
    """See `popxl.planning.measure`.

    Products of a CPU are bounded by its units that multiply, whatever program feeds them. Replicas
    of one process share memory: a link is a copy. Remote rows are used where they lie: what a copy
    reads and what it writes both count.
    """
    kind, place = torch_dtype(data_type), device_named(device)
    if place.where.type != "cpu":
        return gpu_speeds(kind, place)
    flops = multiply_rate(kind, from_cache=False)
    copied = copy_rate()
    if not flops:  # no compiler: the best that is seen
        flops = max(product_rate(width, kind) for width in WIDTHS)
    return Machine(flops=flops, link=copied, remote=2 * copied)


def gpu_speeds(data_type: torch.dtype, device: Device) -> Machine:
    """The speeds of the best of a few products, of a copy within the memory, and of copies from and
    to the host's at the same time: there remote rows wait.
    """
    with device.running(), device.where:
        flops = max(product_rate(width, data_type, device) for width in GPU_WIDTHS)
        return Machine(flops=flops, link=copy_rate(device), remote=host_rate(device))


def host_rate(device: Device) -> float:
    """Bytes/s between a device and the host's memory, both ways together."""
    store, memory = HostStore(2 * COPIED_BYTES, device), device.memory(2 * COPIED_BYTES).bytes

    def exchange() -> None:
        inward = threading.Thread(target=store.read, args=(0, memory[:COPIED_BYTES]))
        inward.start()
        store.write(COPIED_BYTES, memory[COPIED_BYTES:])
        inward.join()

    return 2 * COPIED_BYTES * _per_second(exchange)


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


def copy_rate(device: Device = PROCESSOR) -> float:
    """Bytes/s that PyTorch's threads, or a device, copy: read, and written as many."""
    nbytes = COPIED_BYTES if device is PROCESSOR else READ_BYTES
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    return nbytes * _per_second(lambda: target.copy_(source), device)


def product_rate(width: int, data_type: torch.dtype, device: Device = PROCESSOR) -> float:
    """FLOP/s of products of square matrices, on PyTorch's threads or a device."""
    lhs, rhs = (torch.randn(width, width).to(data_type) for _ in range(2))
    return 2 * width**3 * _per_second(lambda: product(lhs, rhs, data_type), device)


def _per_second(work: Callable[[], object], device: Device = PROCESSOR) -> float:
    """How often the fastest of many goes would fit into a second. A device that works behind the
    program is waited for after some of them.
    """
    times = 1 if device is PROCESSOR else AT_ONCE

    def go() -> None:
        for _ in range(times):
            work()
        if (fence := device.fence()) is not None:
            fence.wait()

    go()
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        begin = time.perf_counter()
        go()
        best = min(best, time.perf_counter() - begin)
    return times / best
