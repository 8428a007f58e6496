"""How many bytes of remote rows a program uses at a time."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from popxl.ir import Ir
from popxl.remote_buffer import RemoteBuffer

from popxl_engine.ir import Block
from popxl_engine.planner.costs import costlier_branch
from popxl_engine.planner.dry_run import DryReplica, dry_run
from popxl_engine.planner.live_bytes import LiveBytes
from popxl_engine.planner.phases import MAIN


class RowUsage(DryReplica):
    """Counts the rows that are borrowed: a row is, as long as a tensor has its memory.

    Args:
        nbytes: of a row of a buffer.
    """

    def __init__(self, live: LiveBytes, index: int, nbytes: Callable[[RemoteBuffer], int]):
        super().__init__(live, borrows_rows=True, index=index)
        self.peaks: dict[str, int] = {}
        """Most bytes of rows in use at a time, by phase."""
        self._nbytes, self._lent = nbytes, 0
        self._borrowed: dict[int, weakref.ref[Any]] = {}

    def remote_load(self, buffer: RemoteBuffer, offset: int) -> torch.Tensor:
        """A row."""
        row = super().remote_load(buffer, offset)
        storage, nbytes = row.untyped_storage(), self._nbytes(buffer)
        key = storage._cdata

        def gone(_: Any) -> None:
            del self._borrowed[key]
            self._lent -= nbytes

        self._borrowed[key] = weakref.ref(storage, gone)
        self._lent += nbytes
        self._note(0)
        return row

    def remote_store(self, buffer: RemoteBuffer, offset: int, held: list[torch.Tensor]) -> None:
        """A row that is not in use already is for a moment."""
        self._note(
            0 if held[0].untyped_storage()._cdata in self._borrowed else self._nbytes(buffer)
        )
        super().remote_store(buffer, offset, held)

    def _note(self, more: int) -> None:
        phase = self.bytes.phase or MAIN
        self.peaks[phase] = max(self.peaks.get(phase, 0), self._lent + more)


@dataclass(frozen=True)
class InUse:
    """Bytes that one replica needs at a time."""

    rows: int
    """Bytes of remote rows, at most."""
    phase: str
    """The phase where it needs most of these."""
    working: int
    """Bytes of everything else, at most: variables, constants, activations, what kernels need on
    the way.
    """


def in_use(
    ir: Ir,
    nbytes: Callable[[RemoteBuffer], int],
    device: torch.device,
    block: Block | None = None,
) -> InUse:
    """What a replica of a program has in use at a time.

    Args:
        nbytes: that a row of a buffer takes.
        device: whose fusions; it need not be there.
        block: of the whole program, compiled for it; default: it is compiled.
    Raises:
        GraphError: a program that cannot be dry-run.
    """
    live, (usage,) = dry_run(
        ir,
        lambda live, index: RowUsage(live, index, nbytes),
        False,
        costlier_branch(ir),
        device,
        block,
    )
    assert isinstance(usage, RowUsage)
    phase = max(usage.peaks, key=lambda name: usage.peaks[name], default=MAIN)
    return InUse(usage.peaks.get(phase, 0), phase, max(live.peaks.values(), default=0))
