"""A GPU that is not there: torch's fake tensors have a device and no memory.

They refuse to mix devices, and have no numbers that anybody could wait for.
"""

import ctypes
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from popxl_engine import compiler
from popxl_engine.analysis.effects import effects_of
from popxl_engine.codegen import SourceGenerator
from popxl_engine.kernels import compiled
from popxl_engine.kernels.dtypes import torch_dtype
from popxl_engine.machine.lockstep import run_lockstep
from popxl_engine.machine.replica import Traffic
from torch._subclasses.fake_tensor import FakeTensorMode

CUDA = torch.device("cuda", 0)
CUDA_TYPE, META_TYPE = 1, 14
"""Values of `c10::DeviceType`."""


def guard_cuda():
    """Give torch's CPU build a guard for the device type "cuda": that of the meta device, which
    does nothing.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * 22).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    assert registry[META_TYPE], "torch has a guard for the meta device"
    registry[CUDA_TYPE] = registry[CUDA_TYPE] or registry[META_TYPE]


@contextmanager
def fake_gpu():
    """A block in which tensors may be on a GPU that is not there."""
    if not torch.cuda.is_available():
        guard_cuda()
    with ExitStack() as stack:
        # nothing runs them
        stack.enter_context(mock.patch.object(compiled, "compiles", lambda: False))
        stack.enter_context(FakeTensorMode())
        yield


class Replica:
    """Stands in for a replica: what it receives is on the GPU, and so must be what it is given."""

    def __init__(self, index):
        self.index, self.rng_path, self.traffic, self.given = index, 0, Traffic(), 0

    def host_load(self, stream):
        return torch.empty(stream.shape, dtype=torch_dtype(stream.dtype), device=CUDA)

    def remote_load(self, buffer, offset):
        return torch.empty(buffer.tensor_shape, dtype=torch_dtype(buffer.tensor_dtype), device=CUDA)

    def host_store(self, stream, t):
        self.given += 1
        assert t.device == CUDA, f"{stream} gets a tensor on {t.device}"

    def begin_lap(self, label):
        pass

    def remote_store(self, buffer, offset, held):
        self.given += 1
        t = held.pop()
        assert t.device == CUDA, f"{buffer} gets a tensor on {t.device}"


def run_on_fake_gpu(ir):
    """Run a program once, as the engine writes it for a GPU. Returns how often its replicas gave
    something away.
    """
    block = compiler.compile(ir, CUDA).block
    with fake_gpu():
        generator = SourceGenerator(
            CUDA, bool(ir._pb_ir.getSessionOptions().enableStochasticRounding)
        )
        name = generator.function(block)
        names = dict(generator.source.names)
        exec(compile(generator.source.text(), "<popxl program on a GPU>", "exec"), names)
        state = [
            np.zeros(t.shape, t.dtype.as_numpy())
            if v.host
            else torch.empty(t.shape, dtype=torch_dtype(t.dtype), device=CUDA)
            for t, v in block.state.items()
        ]
        replicas = [Replica(i) for i in range(ir.replication_factor)]
        if effects_of(block).synchronizes:
            run_lockstep({r.index: names[name](r, *state) for r in replicas})
        else:
            names[name](replicas[0], *state)
    return sum(r.given for r in replicas)
