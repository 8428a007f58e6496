"""The loops that measure what a CPU can do at most do the work that they are counted for."""

import time

import popxl
import pytest
import torch
from helpers.matrices import random
from helpers.products import TYPES
from popxl import extensions
from popxl_engine.machine.device import PROCESSOR, Processor
from popxl_engine.native import library
from popxl_engine.planner import measuring

pytestmark = pytest.mark.skipif(library.library() is None, reason="no C++ compiler")
ROUNDS, NUMBERS = 3, 4096
LOADS = {"registers": 0, "second cache": 1}


def multiplied(panels: torch.Tensor, threads: int, rounds: int, where: str) -> float:
    """The sum of all products."""
    found, before = torch.zeros(2, dtype=torch.float64), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        library.call(
            "multiply_ceiling", (panels.dtype,), panels, NUMBERS, rounds, LOADS[where], found
        )
    finally:
        torch.set_num_threads(before)
    assert found[1] > 0
    return found[0].item()


@pytest.mark.parametrize("where", LOADS)
@pytest.mark.parametrize("dtype", TYPES)
def test_each_round_and_thread_multiplies_as_much_wherever_operands_come_from(dtype, where):
    ones = torch.ones(2 * NUMBERS, dtype=dtype)
    once = multiplied(ones, threads=1, rounds=1, where="second cache")
    assert once % NUMBERS == 0 and once >= 4 * NUMBERS, "each number meets several rows"
    for threads, rounds in ((1, ROUNDS), (2, ROUNDS)):
        assert multiplied(ones, threads, rounds, where) == threads * rounds * once


@pytest.mark.parametrize("dtype", TYPES)
def test_operands_from_the_cache_are_the_panels_numbers(dtype):
    panels = (random(2 * NUMBERS) * 8).round().to(dtype)  # whole numbers: sums are exact
    rows = multiplied(torch.ones(NUMBERS, dtype=dtype), 1, 1, "second cache") / NUMBERS
    for threads in (1, 2):
        own = panels[: threads * NUMBERS].double().sum().item()
        assert multiplied(panels, threads, ROUNDS, "second cache") == ROUNDS * rows * own


def test_reading_reads_every_number():
    numbers = (random(1 << 16) * 8).round()
    done = torch.zeros((), dtype=torch.float64)
    library.call("read_ceiling", (), numbers, numbers.numel(), done)
    assert done.item() == numbers.double().sum().item()


def test_the_rate_is_two_operations_for_each_product_of_the_fastest_go(monkeypatch):
    often = iter([0.0, 50.0, 200.0, 100.0])
    clock = iter([0.0, 0.0, 0.1, 0.2, 0.3])

    def multiply(name, dtypes, panels, numbers, repeats, loads, found):
        products = torch.get_num_threads() * repeats * numbers * 6  # six rows meet each number
        found[0], found[1] = products, next(often)

    monkeypatch.setattr(library, "call", multiply)
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: next(clock))
    numbers = measuring.second_cache() // 2 // 4
    rate = measuring.multiply_rate(torch.float32, from_cache=False, seconds=0.25)
    assert rate == 2 * 6 * numbers * measuring.REPEATS * 200.0


def test_programs_are_told_the_ceiling_of_a_processor_within_a_moment():
    extensions.multiply_ceiling(seconds=0.0)  # loads the library
    begin = time.perf_counter()
    found = extensions.multiply_ceiling(popxl.float32, "cpu", seconds=0.02)
    assert found == 0.0 or time.perf_counter() - begin < 1.0
    assert extensions.multiply_ceiling(popxl.float16, "cpu", seconds=0.02) > 0
    with pytest.raises(ValueError, match="device: got 'tpu'"):
        extensions.multiply_ceiling(device="tpu")


class Behind(Processor):
    """A device that is done with nothing before it is waited for."""

    def __init__(self):
        self.asked, self.done, self.wait = 0, 0, lambda: setattr(self, "done", self.asked)

    def fence(self):
        return self

    def ask(self):
        self.asked += 1


def test_a_devices_work_is_done_when_its_time_is_taken(monkeypatch):
    device, times = Behind(), iter([0.0, 0.0, 0.0, 0.1, 0.1, 0.1, 0.2, 0.2])
    unfinished = []

    def clock():
        unfinished.append(device.asked - device.done)
        return next(times)

    monkeypatch.setattr(measuring.time, "perf_counter", clock)
    monkeypatch.setattr(measuring, "SECONDS", 0.15)
    assert measuring._per_second(device.ask, device) == pytest.approx(measuring.AT_ONCE / 0.1)
    assert unfinished == [0] * 8 and device.asked == 3 * measuring.AT_ONCE


def test_a_gpus_speeds_are_those_of_products_and_copies_there(monkeypatch):
    """The case of a processor that is measured as if it were one."""
    for name, value in {"GPU_WIDTHS": (64,), "COPIED_BYTES": 4096, "SECONDS": 0.01}.items():
        monkeypatch.setattr(measuring, name, value)
    found = measuring.gpu_speeds(torch.float32, PROCESSOR)
    assert min(found.flops, found.link, found.remote) > 0


@pytest.mark.slow
def test_no_product_is_faster_than_the_ceiling():
    ceiling = measuring.multiply_rate(torch.float32, from_cache=False)
    assert measuring.product_rate(512, torch.float32) < 1.25 * ceiling
