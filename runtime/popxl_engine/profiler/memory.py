"""The memory that each phase of a run takes: of tensors, of remote rows, and of the process."""

import os
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from popxl.profile import PhaseMemory
from popxl.remote_buffer import RemoteBuffer

from popxl_engine.machine.allocator import TensorCounter
from popxl_engine.machine.machine import Machine
from popxl_engine.machine.memory import Rows
from popxl_engine.machine.replica import Replica
from popxl_engine.planner.phases import MAIN
from popxl_engine.program import Program


class Counter(AbstractContextManager["Counter"], Protocol):
    """Counts what tensors take inside a block, see `TensorCounter`."""

    def take_most(self) -> int:
        """The most bytes at a time since the last call."""

    def adjust(self, more: int) -> None:
        """Count more bytes from here on, or fewer."""


class GpuCounter(AbstractContextManager["GpuCounter"]):
    """Counts as PyTorch's allocator of a GPU does. What others look for there begins anew."""

    def __init__(self, device: torch.device):
        self._device, self._before = device, torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)

    def __exit__(self, *_: Any) -> None:
        """Nothing is to be undone."""

    def take_most(self) -> int:
        """See `Counter`."""
        most = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return most - self._before

    def adjust(self, more: int) -> None:
        """See `Counter`."""
        self._before -= more


def counter_of(device: torch.device) -> Counter | None:
    """A counter of a device's tensors; None where nobody can count them."""
    if device.type == "cuda":
        return GpuCounter(device)
    try:
        return TensorCounter()
    except RuntimeError:
        return None


@dataclass
class Most:
    """The most bytes of a phase so far."""

    tensors: int = 0
    rows: int = 0
    resident: int = 0


class MemoryWatch:
    """Follows the memory of a run.

    A row that is used where it lies counts as one from when it has memory until that is free, but
    not if a mapped file holds it. Rows that come and go count with all the memory that is theirs.
    """

    def __init__(self, machine: Machine, program: Program):
        self._machine, self._program = machine, program
        self._counter: Counter | None = None
        self._phases: dict[str, Most] = {}
        self._phase = MAIN
        self._state = self._rows = 0

    def phases(self) -> dict[str, PhaseMemory]:
        """What the last run took, by phase."""
        is_counted = self._counter is not None
        return {
            name: PhaseMemory(most.tensors if is_counted else None, most.rows, most.resident)
            for name, most in self._phases.items()
        }

    @contextmanager
    def run(self) -> Iterator[None]:
        """A block around a run of all replicas."""
        self._phases, self._phase = {}, MAIN
        self._state, self._rows = self._state_bytes(), self._row_bytes()
        self._counter = counter_of(self._machine.device.where)
        with ExitStack() as stack:
            if self._counter is not None:
                stack.enter_context(self._counter)
            for replica in self._machine.replicas:
                stack.enter_context(self._follows(replica))
            yield
            self.enter(None, MAIN)

    def enter(self, replica: Replica | None, phase: str) -> None:
        """Note what the phase has come to that ends, and begin another one."""
        resident = resident_bytes()
        self._note(resident)
        self._phase = phase
        self._note(resident)

    def _note(self, resident: int = 0) -> None:
        most = self._phases.setdefault(self._phase, Most())
        most.rows, most.resident = max(most.rows, self._rows), max(most.resident, resident)
        if self._counter is not None:
            most.tensors = max(most.tensors, self._state + self._counter.take_most())

    def _state_bytes(self) -> int:
        """Bytes of variables and constants on the device."""
        found = [t for t in self._program.source.names.values() if isinstance(t, torch.Tensor)]
        for replica in self._machine.replicas:
            state = self._program.block.state.items()
            found += [replica.state[t] for t, value in state if not value.host]
        return sum(
            {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}.values()
        )

    def _row_bytes(self) -> int:
        """Bytes of the device's memory that rows have."""
        if self._machine.caches:
            return sum(cache.transfers.traffic.memory_bytes for cache in self._machine.caches)
        rows = [rows for replica in self._machine.replicas for rows in replica.rows.values()]
        return sum(nbytes_of(each, index) for each in rows for index in range(each.entries))

    @contextmanager
    def _follows(self, replica: Replica) -> Iterator[None]:
        """A block in which rows of a replica that get memory, or lose it, are counted."""
        if self._machine.caches:  # theirs is there from the beginning
            yield
            return
        for name in ("remote_load", "remote_store"):
            setattr(replica, name, partial(self._moved, replica, getattr(replica, name)))
        try:
            yield
        finally:
            del replica.remote_load, replica.remote_store

    def _moved(
        self, replica: Replica, move: Any, buffer: RemoteBuffer, offset: int, *held: Any
    ) -> Any:
        """Load or store a row. A tensor's memory may become the row's, and that of a row that is
        over be left to the tensors that still have it.
        """
        rows = replica.rows[buffer]
        self._note()
        before = nbytes_of(rows, offset)
        loaded = move(buffer, offset, *held)
        change = nbytes_of(rows, offset) - before
        if loaded is not None and change < 0:
            weakref.finalize(loaded.untyped_storage(), self._grow, change).atexit = False
        elif change:
            self._grow(change)
            if self._counter is not None:
                self._counter.take_most()  # what the row took while it came was no tensor's
        self._note()
        return loaded

    def _grow(self, change: int) -> None:
        self._rows += change
        if self._counter is not None:
            self._counter.adjust(-change)


def nbytes_of(rows: Any, index: int) -> int:
    """Bytes of the memory that a row has and no mapped file holds."""
    assert isinstance(rows, Rows), "rows that move have memory from the beginning"
    return rows.own_bytes(index)


def resident_bytes() -> int:
    """Bytes of this process that are in host memory now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
