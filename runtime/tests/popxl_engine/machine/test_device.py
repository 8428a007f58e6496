"""What a GPU is asked for beside kernels, on stand-ins that keep account: page-locked memory,
uploads, free memory.
"""

import gc
import threading
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.copies import Copies
from helpers.fake_gpu import CUDA, fake_gpu
from popxl import Ir
from popxl.errors import RemoteMemoryError
from popxl.extensions import limit_device_memory
from popxl_engine import engine, residency
from popxl_engine.kernels import compiled
from popxl_engine.kernels.linalg import matrix_product, product
from popxl_engine.kernels.rounding import update_noise
from popxl_engine.machine import device as device_module
from popxl_engine.machine.device import Processor
from popxl_engine.machine.paging import HostStore
from popxl_engine.planner.row_usage import InUse
from popxl_engine.stochastic import rounded
from popxl_engine.support import making_on, uploader

GIB = 2**30


class Cudart:
    """CUDA's page-locking."""

    def __init__(self, monkeypatch, error=0):
        self.locked, self.error = {}, error
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "device", nullcontext)

    def cudaHostRegister(self, start, size, flags):  # noqa: N802 - CUDA's names
        if not self.error:
            assert start not in self.locked
            self.locked[start] = size
        return self.error

    def cudaHostUnregister(self, start):  # noqa: N802
        del self.locked[start]
        return 0


class Gpu(Processor):
    """A GPU by its name alone."""

    where = torch.device("cuda", 0)


@pytest.mark.slow
def test_memory_is_page_locked_as_long_as_it_is_there_and_no_longer(monkeypatch):
    cudart = Cudart(monkeypatch)
    store = HostStore(10_000, Gpu())
    part = store.part(4096, 4096)
    assert cudart.locked == {part.data_ptr() - 4096: 10_000}
    del store
    gc.collect()
    assert cudart.locked, "a tensor has the memory"
    part = None
    gc.collect()
    assert cudart.locked == {}
    HostStore(0, Gpu())


def test_memory_that_cannot_be_page_locked_is_told_of_and_its_error_forgotten(monkeypatch, caplog):
    Cudart(monkeypatch, error=801)
    forgotten = []
    monkeypatch.setattr(device_module, "forget_error", forgotten.append)
    HostStore(10_000, Gpu())
    gc.collect()
    assert forgotten == [Gpu.where]
    (record,) = caplog.records
    assert record.message.startswith(
        "remote memory: got CUDA error 801 while page-locking 10000 bytes"
    )


def test_a_program_runs_on_its_gpu_whichever_one_the_thread_is_on(monkeypatch):
    @contextmanager
    def on(device):
        current.append(device)
        yield
        current.pop()

    current, gpu = ["another"], object.__new__(device_module.Gpu)
    gpu.where = torch.device("meta")
    monkeypatch.setattr(torch.cuda, "device", on)
    with gpu.running():
        assert current == ["another", gpu.where]
        assert torch.empty(1).device.type == "cpu", "PyTorch's functions are slower otherwise"
    assert current == ["another"]


def test_what_a_kernel_makes_without_operands_is_made_on_the_programs_device():
    made = making_on(torch.device("meta"), torch.zeros)(3)
    assert made.device.type == "meta" and torch.zeros(3).device.type == "cpu"
    assert making_on(torch.device("cpu"), torch.zeros) is torch.zeros


def test_nobody_waits_until_a_host_value_is_on_a_device():
    with Copies() as copies:
        assert uploader(torch.device("meta"))(np.array(3, np.int32)).device.type == "meta"
    assert copies.waited == [False]


def test_nobody_waits_until_the_seed_of_a_rounding_is_on_a_device():
    with fake_gpu(), Copies() as copies:
        with rounded((5, 0)):
            noise = update_noise(torch.empty(10, dtype=torch.bfloat16, device=CUDA))
        bits = noise.bits(10, 0)
    assert bits.device == CUDA and copies.waited == [False]


def test_products_of_integers_are_made_without_those_that_cuda_lacks(monkeypatch):
    def matmul(lhs, rhs):
        assert lhs.is_floating_point(), "as CUDA"
        return torch.Tensor.matmul(lhs, rhs)

    lhs, rhs = np.array([[2**31, 1]], np.uint32), np.array([[3], [5]], np.uint32)
    monkeypatch.setattr(torch, "matmul", matmul)
    found = product(*(torch.from_numpy(a).as_subclass(OnGpu) for a in (lhs, rhs)), torch.uint32)
    np.testing.assert_array_equal(found.as_subclass(torch.Tensor).numpy(), lhs @ rhs)


@pytest.mark.parametrize("columns, stride", [(5001, 5008), (5008, 5008), (11, 11)])
def test_wide_products_begin_their_rows_on_boundaries(columns, stride):
    random = torch.Generator().manual_seed(0)
    lhs, rhs = (
        torch.randn(shape, generator=random).to(torch.bfloat16)
        for shape in ((7, 64), (64, columns))
    )
    found = matrix_product(lhs.as_subclass(OnGpu), rhs.as_subclass(OnGpu)).as_subclass(torch.Tensor)
    assert found.stride() == (stride, 1)
    torch.testing.assert_close(found, lhs @ rhs)
    with fake_gpu():
        lhs, rhs = (torch.empty(t.shape, dtype=t.dtype, device=CUDA) for t in (lhs, rhs))
        assert product(lhs, rhs, lhs.dtype).stride() == (stride, 1)


def test_what_torch_keeps_of_a_gpus_memory_is_free_for_rows(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 90 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 12 * GIB)
    found = residency._device_memory(Ir(), Gpu(), 1, InUse(rows=GIB, phase="main", working=GIB))
    assert found == int(0.9 * 80 * GIB) - GIB


@pytest.mark.parametrize("limit, share", [(25 * GIB, 25), (0.25, 25), (0.9, 80), (99 * GIB, 80)])
def test_a_limit_is_bytes_or_a_share_of_a_gpus_memory_as_far_as_it_is_free(
    limit, share, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    ir, needed = Ir(), InUse(rows=GIB, phase="main", working=GIB)
    limit_device_memory(ir, limit)
    assert residency._device_memory(ir, Gpu(), 1, needed) == (share - 1) * GIB
    with pytest.raises(
        RemoteMemoryError,
        match=f"got {share * GIB} bytes of cuda:0; expected at least {81 * GIB}: ",
    ):
        residency._device_memory(ir, Gpu(), 1, InUse(rows=GIB, phase="main", working=80 * GIB))


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def on_gpu(*shape):
    return torch.ones(shape).as_subclass(OnGpu)


def test_what_cannot_be_compiled_runs_step_by_step_and_is_told_of_once(monkeypatch, caplog):
    def no_compiler(*_):
        raise torch._dynamo.exc.TorchDynamoException("Failed to find C compiler.\nand more")

    monkeypatch.setattr(compiled, "compiles", lambda: True)
    monkeypatch.setattr(torch, "compile", lambda fn, **_: no_compiler)
    double = compiled.one_pass(lambda t: t * 2)
    for _ in range(2):
        assert double(on_gpu(3)).tolist() == [2, 2, 2]
    (record,) = caplog.records
    assert "got 'Failed to find C compiler.' while compiling" in record.message


def test_more_variants_than_are_compiled_run_step_by_step_and_the_others_go_on(monkeypatch, caplog):
    def of_three(t):
        if t.numel() != 3:
            raise torch._dynamo.exc.FailOnRecompileLimitHit("too many")
        return t * 2 + 100

    monkeypatch.setattr(compiled, "compiles", lambda: True)
    monkeypatch.setattr(torch, "compile", lambda fn, **_: of_three)
    double = compiled.one_pass(lambda t: t * 2)
    assert [double(on_gpu(n)).tolist()[0] for n in (3, 4, 3)] == [102, 2, 102]
    assert not caplog.records


def test_each_thread_may_compile_as_many_variants(monkeypatch):
    found = []

    def limit():
        compiled.one_pass(lambda t: t)(on_gpu(3))
        found.append(torch._dynamo.config.recompile_limit)

    monkeypatch.setattr(compiled, "compiles", lambda: True)
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    for _ in range(2):
        thread = threading.Thread(target=limit)
        thread.start()
        thread.join()
    assert found == [compiled.VARIANTS] * 2


def test_only_an_interpreted_run_changes_the_default_device():
    runs = object.__new__(engine.Engine)
    runs.device = SimpleNamespace(where=torch.device("meta"), running=nullcontext)
    for program, expected in ((None, "meta"), (object(), "cpu")):
        runs.program = program
        with runs._on_device():
            assert torch.empty(1).device.type == expected


def test_an_error_of_what_was_compiled_is_raised(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(compiled, "compiles", lambda: True)
    monkeypatch.setattr(torch, "compile", lambda fn, **_: full)
    with pytest.raises(torch.OutOfMemoryError):
        compiled.one_pass(lambda t: t * 2)(on_gpu(3))
