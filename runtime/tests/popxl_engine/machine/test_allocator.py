"""What the allocator is told about large blocks, and the one that tensors take theirs from."""

import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers.processes import environment
from popxl_engine.machine.allocator import (
    TensorCounter,
    keep_tensors_together,
    release_freed_memory,
)
from popxl_engine.native import build, library
from torch.profiler import ProfilerActivity, profile

needs_compiler = pytest.mark.skipif(
    library.library() is None, reason="no C++ compiler: tensors take the C library's memory"
)

RESIDENT = """
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
"""
KEEPS = """
import numpy as np
from popxl_engine.machine.allocator import keep_freed_memory

def filled(nbytes):
    return np.ones(nbytes, np.uint8)

blocks = [filled(100_000) for _ in range(1000)]
kept = blocks[::10]
del blocks
before = resident()
assert keep_freed_memory()
assert before - resident() > 50e6, "holes between blocks are handed back"
large = filled(200_000_000)
del large
assert resident() > before + 50e6, "large blocks are kept from here on"
assert keep_freed_memory() and resident() > before + 50e6, "and nothing is handed back again"
"""
LEAVES_NO_HOLES = """
import random
import torch
from popxl_engine.machine.allocator import (
    keep_freed_memory, keep_tensors_together, release_freed_memory,
)
assert keep_tensors_together()
keep_freed_memory()
torch.ones(1 << 20).sum()  # loads what it needs
draw, held, used, most = random.Random(0), [], 0, 0
before = resident()
for _ in range(5_000):
    t = torch.ones(int(2 ** draw.uniform(14, 20)))  # 64 KiB to 4 MiB
    held.append(t)
    used += t.nbytes
    while used > 120e6:
        used -= held.pop(draw.randrange(len(held))).nbytes
    most = max(most, used)
del t
taken = resident() - before
assert taken < 1.1 * most, (taken, most)
del held
assert resident() - before > 0.8 * most, "freed blocks are kept for the next run"
release_freed_memory()
assert resident() - before < 0.1 * most, "and handed back when asked"
"""


def run(code: str) -> None:
    command = [sys.executable, "-c", RESIDENT + code]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_what_was_freed_before_runs_is_handed_back_and_what_runs_free_is_kept():
    run(KEEPS)


@pytest.mark.slow
@needs_compiler
def test_tensors_of_many_sizes_leave_few_holes_between_them():
    run(LEAVES_NO_HOLES)


# Tensors of this process


@pytest.fixture
def together():
    """Tensors of this process come from the allocator."""
    if library.library() is None:
        pytest.skip("no C++ compiler: tensors take the C library's memory")
    assert keep_tensors_together()


def marked(draw: random.Random) -> tuple[torch.Tensor, int]:
    """A tensor of a size at random, of any alignment, and the number that all of it is."""
    number = draw.randrange(256)
    return torch.full((int(2 ** draw.uniform(10, 21)),), number, dtype=torch.uint8), number


def churn(seed: int) -> None:
    """Take and give back blocks, each of which must keep its contents, and lie well."""
    draw = random.Random(seed)
    held: list[tuple[torch.Tensor, int]] = []
    for _ in range(400):
        held.append(marked(draw))
        if len(held) > 30:
            t, number = held.pop(draw.randrange(len(held)))
            assert t.data_ptr() % 64 == 0
            assert bool((t == number).all()), "blocks do not overlap"
        if draw.random() < 0.02:
            release_freed_memory()
    assert all(bool((t == number).all()) for t, number in held)


@pytest.mark.slow
def test_blocks_keep_their_contents_in_several_threads(together: Any) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(churn, range(4))) == [None] * 4


@pytest.mark.slow
def test_a_fork_has_its_own_copy_of_tensors_and_takes_more(together: Any) -> None:
    t = torch.zeros(1 << 20)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)  # a fork has none of OpenMP's threads
            t += 1
            churn(1)
            code = 0 if float(t.sum()) == t.numel() else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert not t.any()


def test_a_tensor_shares_its_memory_with_numpy_and_other_processes(together: Any) -> None:
    t = torch.arange(1 << 16)
    array = t.numpy()
    del t
    churn(2)
    assert (array == range(1 << 16)).all()
    shared = torch.ones(1 << 20).share_memory_()
    assert shared.is_shared() and float(shared.sum()) == shared.numel()


def test_a_storage_that_grows_keeps_its_contents(together: Any) -> None:
    t = torch.arange(1 << 14)
    t.resize_(1 << 18)
    assert torch.equal(t[: 1 << 14], torch.arange(1 << 14))


def test_pytorch_accounts_for_the_memory(together: Any) -> None:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        t = torch.empty(1 << 20)
        del t
    events = profiler.profiler.kineto_results.events()
    assert [e.nbytes() for e in events if e.name() == "[memory]"] == [4 << 20, -(4 << 20)]


def test_tensors_are_counted_while_somebody_asks(together: Any) -> None:
    before, small = torch.empty(3 << 20, dtype=torch.uint8), 4000
    with TensorCounter() as counter:
        tensors = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in (5 << 20, small)]
        most = (5 << 20) + small
        assert most <= counter.take_most() <= most + 2 * 64
        del tensors[0], before
        assert counter.take_most() >= most, "as much as there was when they asked before"
        assert small - (3 << 20) - 64 <= counter.take_most() <= small - (3 << 20) + 64
        counter.adjust(3 << 20)
        with ThreadPoolExecutor(1) as pool:
            tensors.append(pool.submit(torch.empty, 1 << 20, dtype=torch.uint8).result())
        most = (1 << 20) + small
        assert most <= counter.take_most() <= most + 2 * 64
    counter = TensorCounter()
    tensors.append(torch.empty(1 << 20))
    assert counter.take_most() == 0, "and not else"
    with counter:
        assert counter.take_most() == 0


def test_too_much_is_refused_in_pytorchs_words(together: Any) -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        torch.empty(1 << 60, dtype=torch.uint8)


# Where there is none


@pytest.mark.slow
def test_without_compiled_code_the_c_librarys_memory_is_used():
    run(
        """
import os
os.environ["POPXL_NATIVE"] = "0"
import torch
from popxl_engine.machine.allocator import keep_tensors_together, release_freed_memory
from popxl_engine.machine.allocator import TensorCounter
assert not keep_tensors_together()
torch.ones(1 << 20).sum()
release_freed_memory()
try:
    TensorCounter()
except RuntimeError as error:
    assert "expected the runtime's own allocator" in str(error)
else:
    raise AssertionError("nobody counts")
"""
    )


def test_a_pytorch_without_headers_has_none_compiled(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        build.importlib.util,
        "find_spec",
        lambda _: type("Spec", (), {"origin": str(tmp_path / "torch" / "__init__.py")}),
    )
    assert build.allocator.__wrapped__() is None
