"""Memory for rows that the sessions of a process share: who runs has it, and others give up as much
as that takes.

So a limit holds for a process: training, validation and generation, one after the other, together
take no more than one of them. Rows of a session that has given its memory up are all in its stores;
a few of them are read and written there by the host, between runs, through a row's memory at a
time.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from popxl_engine.machine.device import PROCESSOR, Device
from popxl_engine.machine.paging.arena import Arena
from popxl_engine.machine.paging.cache import Cache
from popxl_engine.machine.paging.row import Row, Staying
from popxl_engine.machine.paging.store import Store


class RowMemory:
    """One replica's memory for rows: a part for those that stay, and an arena in which the others
    come and go.

    Args:
        arena_bytes: of the arena that the cache has.
        staying: the rows that stay, one after the other, and no memory yet.
        open_store: for those rows, from their bytes together and those of the largest; called when
            it is first needed.
        device: where the memory is.
    """

    def __init__(
        self,
        cache: Cache,
        arena_bytes: int,
        staying: Sequence[Staying],
        open_store: Callable[[int, int], Store],
        device: Device,
    ):
        self.cache, self.is_parked = cache, False
        self.lock = threading.RLock()
        self._arena_bytes, self._staying, self._open_store, self._device = (
            arena_bytes,
            staying,
            open_store,
            device,
        )
        self._fixed_bytes = sum(row.size for row in staying)
        self._store: list[Store] = []
        """The store of the rows that stay, if they ever had to leave."""
        weakref.finalize(self, close, self._store)
        self._cut()

    @property
    def nbytes(self) -> int:
        """Bytes that it takes when it is not given up."""
        return self._arena_bytes + self._fixed_bytes

    def park(self) -> None:
        """Put all rows into stores, and give the memory up, unless a run needs it, or a tensor has
        some of it.

        Raises:
            RemoteMemoryError: a store that fails, or has no room for the rows that stay.
        """
        with self.lock:
            if self.cache.is_in_use:
                return
            if self._fixed_bytes and not self._store:
                self._store.append(
                    self._open_store(self._fixed_bytes, max(row.size for row in self._staying))
                )
            if (fence := self._device.fence()) is not None:
                fence.wait()
            for row in self._staying:
                if row.size:
                    assert row.memory is not None
                    self._store[0].write(row.start, row.memory)
            self.cache.park()
            self.is_parked = True
            for row in self._staying:
                row.set_memory(None)

    def resume(self) -> None:
        """Have memory again. Rows that stay are read now, others when they are needed. Raises as
        `Device.memory`.
        """
        with self.lock:
            arena = Arena(self._arena_bytes, self._device)
            self._cut()
            for row in self._staying:
                if row.size:
                    assert row.memory is not None
                    self._store[0].read(row.start, row.memory)
            self.cache.resume(arena)
            self.is_parked = False

    def _cut(self) -> None:
        """Take memory for the rows that stay. To PyTorch each is on its own: its compiler refuses
        to write to tensors of several types that share memory.
        """
        memory = Arena(self._fixed_bytes, self._device)
        for extent in memory.extents:
            for one in extent.after:
                one.wait()
        for row in self._staying:
            part = memory.bytes[row.start : row.start + row.size]
            row.set_memory(self._device.window(part, _noted_by_nobody) if row.size else part)

    def fetched(self, row: Row | Staying) -> torch.Tensor:
        """A copy of a row's bytes on the host, while the memory is given up."""
        memory = PROCESSOR.memory(row.size).bytes
        if row.size:
            self._store_of(row).read(row.start, memory)
        return memory

    def put(self, row: Row | Staying, memory: torch.Tensor) -> None:
        """Set a row from all of its bytes on the host, which start on a page, while the memory is
        given up.
        """
        if row.size:
            self._store_of(row).write(row.start, memory)

    def _store_of(self, row: Row | Staying) -> Store:
        return self.cache.transfers.store if isinstance(row, Row) else self._store[0]


def _noted_by_nobody() -> None:
    """A row that stays is given back with all the others."""


def close(stores: Sequence[Store]) -> None:
    """Give up stores whose rows are gone."""
    for store in stores:
        store.close()


class Tenant:
    """What one session has of a process's memory for rows, over its replicas.

    Args:
        limit: bytes that sessions may have together while this one runs.
    """

    def __init__(self, limit: int):
        self.limit, self.is_busy = limit, False
        self.memories: list[RowMemory] = []

    @property
    def held_bytes(self) -> int:
        """Bytes that it has now."""
        return sum(memory.nbytes for memory in self.memories if not memory.is_parked)

    def park(self) -> None:
        """Give up what no run needs, and no tensor has some of."""
        if self.is_busy:
            return
        for memory in self.memories:
            if not memory.is_parked:
                memory.park()


class Budget:
    """Memory of one kind in one process. Sessions that run at the same time, in threads, each have
    their own.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._tenants: list[weakref.ref[Tenant]] = []
        """The tenants; who ran longest ago comes first."""

    @property
    def held_bytes(self) -> int:
        """Bytes that sessions have now."""
        with self._lock:
            return sum(tenant.held_bytes for tenant in self._alive())

    def make_room(self, tenant: Tenant, nbytes: int) -> None:
        """Have others give their memory up, before a tenant takes so many bytes, until all is
        within its limit.
        """
        with self._lock:
            others = self._others(tenant)
            for other in others:
                if sum(one.held_bytes for one in others) + nbytes <= tenant.limit:
                    return
                other.park()

    @contextmanager
    def turn(self, tenant: Tenant) -> Iterator[None]:
        """A block around what needs a session's rows where its program uses them."""
        with self._lock:
            self._others(tenant)
            if any(memory.is_parked for memory in tenant.memories):
                self.make_room(tenant, sum(memory.nbytes for memory in tenant.memories))
            for memory in tenant.memories:
                if memory.is_parked:
                    memory.resume()
            tenant.is_busy = True
        try:
            yield
        finally:
            tenant.is_busy = False

    def _others(self, tenant: Tenant) -> list[Tenant]:
        """All but one, which from now on is the last that ran."""
        others = [other for other in self._alive() if other is not tenant]
        self._tenants = [weakref.ref(one) for one in (*others, tenant)]
        return others

    def _alive(self) -> list[Tenant]:
        return [
            tenant for tenant in (reference() for reference in self._tenants) if tenant is not None
        ]


BUDGETS: dict[tuple[str, torch.device], Budget] = {}
"""The budgets of this process, by kind of memory and device."""


def budget_of(what: str, where: torch.device) -> Budget:
    """A process's memory of one kind, as `Paging.what` names it, on one device."""
    return BUDGETS.setdefault((what, where), Budget())
