"""The remote buffers of a replica whose rows come and go, and what decides which of them stay in
memory.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

import torch
from popxl.errors import RemoteMemoryError
from popxl.remote_buffer import RemoteBuffer

from popxl_engine.kernels.dtypes import torch_dtype
from popxl_engine.machine.device import PROCESSOR, Device
from popxl_engine.machine.memory import check_index, copy_apart
from popxl_engine.machine.paging.access_trace import AccessTrace
from popxl_engine.machine.paging.arena import Arena
from popxl_engine.machine.paging.budget import RowMemory
from popxl_engine.machine.paging.cache import Cache
from popxl_engine.machine.paging.hazards import RULES
from popxl_engine.machine.paging.row import Row, Staying
from popxl_engine.machine.paging.store import BLOCK, Store

STAYING = 8
"""The smallest rows stay in memory, up to one part in so many of it: for them, the way to the store
is the cost.
"""

RowId = tuple[RemoteBuffer, int]


def in_blocks(nbytes: int) -> int:
    """Bytes that a row takes in memory and in a store."""
    return -(-nbytes // BLOCK) * BLOCK


@dataclass(frozen=True)
class Paging:
    """What is known of a program whose rows come and go between a device's memory and a store."""

    what: str
    """The memory in words: "host memory", or "device memory for rows"."""
    store: str
    """The store in words: "files" or "host memory"."""
    memory: int
    """Its bytes, over the replicas of this process."""
    open_store: Callable[[int, int], Store]
    """The way to open a store, from the bytes of a replica's rows, and those of the largest one."""
    device: Device = PROCESSOR
    """The device where the memory is."""
    events: Sequence[tuple[RowId, bool]] | None = None
    """The rows that a run takes, in order, and whether it stores; None where that is not
    certain.
    """
    variables: Set[RowId] = frozenset()
    """Rows that the host may read between runs."""
    needed: tuple[int, str] = (0, "")
    """Bytes of rows that a replica has in use at a time, and where."""
    look_ahead: bool = True
    rules: frozenset[str] = field(default=RULES)


class PagedBuffer:
    """The slots of one remote buffer on one replica, some of them in memory.

    Args:
        slots: what is known of each row, by the memory if it stays there, else by the memory's
            cache.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        slots: Sequence[Staying | Row],
        memory: RowMemory,
    ):
        self.shape, self.dtype = tuple(shape), dtype
        self.row_bytes = torch.Size(self.shape).numel() * dtype.itemsize
        self._slots, self._memory, self._cache = slots, memory, memory.cache

    @property
    def entries(self) -> int:
        """Number of rows."""
        return len(self._slots)

    def load(self, index: int) -> torch.Tensor:
        """The row itself, which stays where it is as long as the tensor or a view of it lives.
        Waits for the store.

        A copy on the host where the session's memory is given up.

        Raises:
            IndexError: outside the buffer.
            RemoteMemoryError: a transfer has failed.
        """
        check_index(index, self.entries)
        slot = self._slots[index]
        with self._memory.lock:  # another session's turn may come, until the row is pinned
            if self._memory.is_parked:
                return self._tensor(self._memory.fetched(slot)[: self.row_bytes])
            if isinstance(slot, Staying):
                assert slot.tensor is not None
                return slot.tensor
            memory = self._cache.borrow(slot)[: self.row_bytes]
        return self._tensor(self._cache.device.window(memory, partial(self._cache.release, slot)))

    def store(self, index: int, t: torch.Tensor) -> None:
        """Write a row. Storing a row into itself is free. Raises as `load`."""
        check_index(index, self.entries)
        slot = self._slots[index]
        with self._memory.lock:  # as in `load`
            if self._memory.is_parked:
                memory = PROCESSOR.memory(slot.size).bytes
                copy_apart(self._tensor(memory[: self.row_bytes]), t)
                self._memory.put(slot, memory)
                return
            if isinstance(slot, Staying):
                assert slot.tensor is not None
                copy_apart(slot.tensor, t)
                return
            memory = self._cache.borrow_to_fill(slot)
        try:
            copy_apart(self._tensor(memory[: self.row_bytes]), t)
        finally:
            self._cache.filled(slot)

    def donate(self, index: int, held: list[torch.Tensor]) -> None:
        """The same as `store`, of the tensor in a list, which is taken out: rows that move have
        memory of their own.
        """
        self.store(index, held.pop())

    def _tensor(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.view(self.dtype).view(self.shape)


def shared_bytes(paging: Paging, buffers: Sequence[RemoteBuffer], replicas: int) -> int:
    """Bytes of memory that the rows of a process's replicas take at most; raises as
    `make_paged_buffer`.
    """
    memory = paging.memory // replicas // BLOCK * BLOCK
    check_memory(paging, memory, replicas)
    return replicas * min(memory, sum(in_blocks(nbytes_of(b)) * b.entries for b in buffers))


def make_paged_buffer(
    paging: Paging, buffers: Sequence[RemoteBuffer], replicas: int
) -> tuple[dict[RemoteBuffer, PagedBuffer], RowMemory]:
    """The buffers of one of a process's replicas.

    Raises:
        RemoteMemoryError: too little memory for the program, or a store that does not take the
            rows.
    """
    memory = paging.memory // replicas // BLOCK * BLOCK
    check_memory(paging, memory, replicas)
    sizes = {(b, i): nbytes_of(b) for b in buffers for i in range(b.entries)}
    fits = sum(map(in_blocks, sizes.values())) <= memory  # the store then needs nothing
    staying = (
        list(sizes) if fits else smallest(sizes, min(memory // STAYING, memory - paging.needed[0]))
    )
    held, offset = {}, 0
    for b, i in staying:
        held[b, i] = Staying(
            offset, in_blocks(sizes[b, i]), b.tensor_shape, torch_dtype(b.tensor_dtype)
        )
        offset += held[b, i].size
    moving = [row for row in sizes if row not in held]
    arena = Arena(min(memory - offset, sum(in_blocks(sizes[row]) for row in moving)), paging.device)
    numbers = {row: index for index, row in enumerate(moving)}
    trace = None
    if paging.events is not None:
        events = ((numbers[row], stores) for row, stores in paging.events if row in numbers)
        trace = AccessTrace(events, [in_blocks(sizes[row]) for row in moving])
    rows, end = [], 0
    for index, row in enumerate(moving):
        carries = trace is None or row in paging.variables or not trace.begins_with_store(index)
        rows.append(Row(index, end, in_blocks(sizes[row]), carries))
        end += rows[-1].size
    store = paging.open_store(end, max((row.size for row in rows), default=0))
    cache = Cache(rows, arena, store, trace, paging.look_ahead, paging.rules, paging.device)
    traffic = cache.transfers.traffic
    traffic.store = paging.store
    try:
        shared = RowMemory(
            cache, len(arena.bytes), list(held.values()), paging.open_store, paging.device
        )
    except RemoteMemoryError:  # its threads hold its memory and its file
        cache.close()
        raise
    traffic.memory_bytes, traffic.file_bytes = shared.nbytes, end
    slots = {
        b: [held[b, i] if (b, i) in held else rows[numbers[b, i]] for i in range(b.entries)]
        for b in buffers
    }
    return {
        b: PagedBuffer(b.tensor_shape, torch_dtype(b.tensor_dtype), slots[b], shared)
        for b in buffers
    }, shared


def nbytes_of(buffer: RemoteBuffer) -> int:
    """Bytes of one row."""
    return torch.Size(buffer.tensor_shape).numel() * torch_dtype(buffer.tensor_dtype).itemsize


def smallest(sizes: dict[RowId, int], memory: int) -> list[RowId]:
    """The smallest rows, as many as fit into some memory; those without elements in any case."""
    found = []
    for row, nbytes in sorted(sizes.items(), key=lambda item: item[1]):
        memory -= in_blocks(nbytes)
        if nbytes and memory < 0:
            break
        found.append(row)
    return found


def check_memory(paging: Paging, memory: int, replicas: int) -> None:
    """RemoteMemoryError if a replica's memory does not hold the rows that its program uses at a
    time.
    """
    needed, where = paging.needed
    if memory < needed:
        raise RemoteMemoryError(
            f"remote memory: got {paging.memory} bytes of {paging.what}; expected at least "
            f"{needed * replicas} for the rows in use at a time in {where}. Take more, or smaller "
            "micro-batches."
        )
