"""The device where a process's tensors live and its kernels run: the machine's processor, or a GPU
beside it.

A GPU works behind the program: what it is asked for is done later, in order. A `Fence` is a point
in that order.
"""

import logging
import mmap
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol

import numpy as np
import torch
from poprun.cores import usable_cores
from poprun.tasks import index_here
from popxl.errors import RemoteMemoryError
from popxl.host_limits import host_memory

logger = logging.getLogger("popxl")
MANY_BYTES = 2**30
"""Bytes of memory that one thread would take a tenth of a second for."""


class Fence(Protocol):
    """What a device has been asked for until some moment."""

    @property
    def is_done(self) -> bool:
        """Whether all of it is done."""

    def wait(self) -> None:
        """Return when it is."""


class Memory(Protocol):
    """Bytes on a device that start on a page, and are there from the beginning."""

    bytes: torch.Tensor
    """uint8 [n]."""

    def decommit(self, start: int, size: int) -> None:
        """Let the system have a segment until it is used again, where it takes it; the contents are
        lost.
        """


class Device(Protocol):
    """The device where tensors live."""

    where: torch.device

    def memory(self, nbytes: int) -> Memory:
        """New memory, of which the device may still be asked for what it did there before: a
        `fence` says until when.

        RemoteMemoryError where there is not so much.
        """

    def window(self, memory: torch.Tensor, gone: Callable[[], None]) -> torch.Tensor:
        """The same memory, uint8 [n], as a tensor with a storage of its own; calls ``gone`` with
        that one's end.
        """

    def fence(self) -> Fence | None:
        """What the device has been asked for so far; None where all of it is done."""

    def lane(self) -> "CopyStream":
        """A way between this memory and the host's, beside the program."""

    def running(self) -> AbstractContextManager[Any]:
        """A block around a program: its work is done here. PyTorch's default device stays the
        processor: a default of another kind costs every call of a PyTorch function a microsecond or
        more.
        """


class CopyStream(Protocol):
    """Copies one after the other, beside what the program asks for."""

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes. Returns when they are there."""


# The processor


class Pages:
    """The host's memory, which the system has again when neither this nor a tensor of it is there.

    In large pages where there are any: kernels and transfers look up fewer.
    """

    def __init__(self, nbytes: int):
        left = host_memory()
        # the system would end this process or another one, without a word
        if nbytes > left.available:
            raise RemoteMemoryError(
                f"remote memory: got {nbytes} bytes of host memory to take; expected at most the "
                f"{left.available} that are left of {left.total} ({left.limited_by}). Take less, "
                "or raise that limit."
            )
        try:
            self._map = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise RemoteMemoryError(
                f"remote memory: got '{error.strerror}' for {nbytes} bytes of host memory; "
                "expected a system that has them. Take less."
            ) from error
        with suppress(OSError):  # a system without them
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._array = np.frombuffer(self._map, np.uint8)
        touch(self._array)
        self.bytes = torch.from_numpy(self._array[:nbytes])

    def lock(self, device: torch.device) -> None:
        """Keep it where it is, so that a GPU reaches it at full speed; without, copies are slower
        and right.
        """
        start, nbytes = self.bytes.data_ptr(), self.bytes.numel()
        if not nbytes:
            return
        if code := int(torch.cuda.cudart().cudaHostRegister(start, nbytes, 0)):
            forget_error(device)
            logger.warning(
                "remote memory: got CUDA error %s while page-locking %d bytes of host memory; "
                "expected a system that allows it. Rows travel more slowly; raise the limit of "
                "locked memory (ulimit -l).",
                *(code, nbytes),
            )
            return
        # Before the system has it again: a GPU would go on with these pages at the same address of
        # other memory.
        weakref.finalize(self._array, unlock, start, device).atexit = False

    def decommit(self, start: int, size: int) -> None:
        """See `Memory`."""
        self._map.madvise(mmap.MADV_DONTNEED, start, size)


def touch(memory: np.ndarray) -> None:
    """Take all pages of some memory now: the system clears each, in several threads where that
    takes long.
    """
    pages = memory[:: mmap.PAGESIZE]
    if len(memory) < MANY_BYTES:
        pages[:] = 0
        return
    parts = np.array_split(pages, usable_cores())
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(lambda part: part.fill(0), parts))


class Processor:
    """The host itself, which has done what it was asked for when the call returns."""

    where = torch.device("cpu")

    def memory(self, nbytes: int) -> Memory:
        """See `Device`."""
        return Pages(nbytes)

    def window(self, memory: torch.Tensor, gone: Callable[[], None]) -> torch.Tensor:
        """See `Device`."""
        view = memory.numpy()[:]
        weakref.finalize(view, gone).atexit = False
        return torch.from_numpy(view)

    def fence(self) -> Fence | None:
        """See `Device`."""
        return None

    def lane(self) -> CopyStream:
        """See `Device`."""
        return SynchronousCopies()

    def running(self) -> AbstractContextManager[Any]:
        """See `Device`."""
        return nullcontext()


class SynchronousCopies:
    """Plain copies."""

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """See `CopyStream`."""
        into.copy_(source)


PROCESSOR = Processor()


# A GPU


class DeviceMemory:
    """A GPU's memory."""

    def __init__(self, nbytes: int, device: torch.device):
        try:
            self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            free, _ = torch.cuda.mem_get_info(device)
            raise RemoteMemoryError(
                f"remote memory: got {nbytes} bytes for rows on {device}, which has {free} left; "
                "expected no more. Take less device memory for rows."
            ) from error

    def decommit(self, start: int, size: int) -> None:
        """See `Memory`. It stays taken."""


class EventFence:
    """A fence on a GPU: an event in the stream that the program uses."""

    def __init__(self, stream: "torch.cuda.Stream"):
        self._event = torch.cuda.Event()
        self._event.record(stream)

    @property
    def is_done(self) -> bool:
        """See `Fence`."""
        return bool(self._event.query())

    def wait(self) -> None:
        """See `Fence`."""
        self._event.synchronize()


class Stream:
    """Copies in a stream of their own."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """See `CopyStream`."""
        # A thread is on the first GPU; coming back to that from a stream of another one would take
        # memory there.
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
        self._stream.synchronize()


class Interface:
    """Memory of a GPU as other libraries see it, see Numba's "CUDA Array Interface"."""

    def __init__(self, memory: torch.Tensor):
        self._memory = memory

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        start: tuple[int, bool] = (self._memory.data_ptr(), False)
        return {
            "shape": (self._memory.numel(),),
            "typestr": "|u1",
            "data": start,
            "strides": None,
            "version": 2,
        }


class Gpu:
    """One GPU of this machine. Products of 16-bit numbers are summed in float32 to their end."""

    def __init__(self, device: torch.device):
        self.where = device
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self._stream = torch.cuda.current_stream(device)

    def memory(self, nbytes: int) -> Memory:
        """See `Device`."""
        return DeviceMemory(nbytes, self.where)

    def window(self, memory: torch.Tensor, gone: Callable[[], None]) -> torch.Tensor:
        """See `Device`."""
        holder = Interface(memory)
        weakref.finalize(holder, gone).atexit = False
        return torch.as_tensor(holder, device=self.where)

    def fence(self) -> Fence | None:
        """See `Device`."""
        return EventFence(self._stream)

    def lane(self) -> CopyStream:
        """See `Device`."""
        return Stream(self.where)

    @contextmanager
    def running(self) -> Iterator[None]:
        """See `Device`. Another session, or another thread, may be on another GPU."""
        with torch.cuda.device(self.where):
            yield


def device_named(name: str) -> Device:
    """The device with a name: "cpu", "cuda", "cuda:1", or "auto", a GPU where there is one.

    A process of several on one machine takes "cuda" as the GPU with its number among them.

    Raises:
        ValueError: an unknown name, or a GPU that is not there.
    """
    count = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
    kind, _, which = name.partition(":")
    if name == "cpu" or name == "auto" and not count:
        return PROCESSOR
    if kind not in ("auto", "cuda") or which and not which.isdigit():
        raise ValueError(f"device: got {name!r}; expected 'cpu', 'cuda', 'cuda:N' or 'auto'.")
    index = int(which) if which else index_here() % max(count, 1)
    if index >= count:
        found = (
            f"{count} GPUs" if count else "no GPU" if torch.version.cuda else "a torch without CUDA"
        )
        raise ValueError(
            f"device: got {name!r} on a machine with {found}; expected a GPU that is there. Use "
            "'cpu', or install torch's CUDA build (docs/index.md)."
        )
    return Gpu(torch.device("cuda", index))


def unlock(start: int, device: torch.device) -> None:
    """Undo `Pages.lock`."""
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(start)


def forget_error(device: torch.device) -> None:
    """Forget the error of a call that has returned it: CUDA keeps it, and the next kernel would
    raise it.
    """
    with suppress(RuntimeError):
        torch.ones((), device=device)
