"""What the threads that read and write files of remote memory do while a program runs."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from popxl_engine.machine.machine import Machine
from popxl_engine.machine.paging.store import Store


@dataclass(frozen=True)
class Transfer:
    """One row on its way between a replica's memory and its file."""

    replica: int
    is_read: bool
    nbytes: int
    begin: int
    end: int


class WatchedStore:
    """A store whose transfers are noted once they have ended."""

    def __init__(self, store: Store, replica: int, log: list[Transfer]):
        self.store, self.replica, self.log = store, replica, log
        self.is_direct = store.is_direct

    def read(self, start: int, into: torch.Tensor) -> None:
        """See `Store`."""
        self._note(True, len(into), lambda: self.store.read(start, into))

    def write(self, start: int, data: torch.Tensor) -> None:
        """See `Store`."""
        self._note(False, len(data), lambda: self.store.write(start, data))

    def close(self) -> None:
        """See `Store`."""
        self.store.close()

    def _note(self, is_read: bool, nbytes: int, transfer: Callable[[], None]) -> None:
        begin = time.perf_counter_ns()
        transfer()
        self.log.append(Transfer(self.replica, is_read, nbytes, begin, time.perf_counter_ns()))


@contextmanager
def watched(machine: Machine) -> Iterator[list[Transfer]]:
    """The transfers of files that end while the block runs."""
    log: list[Transfer] = []
    movers = [cache.transfers for cache in machine.caches]
    stores = [mover.store for mover in movers]
    try:
        for mover, replica in zip(movers, machine.replicas):
            mover.store = WatchedStore(mover.store, replica.index, log)
        yield log
    finally:
        for mover, store in zip(movers, stores):
            mover.store = store
