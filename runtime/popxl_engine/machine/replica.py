"""What one replica of this process owns: its variables, its remote rows, and its position in the
streams of a run.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from popxl.remote_buffer import RemoteBuffer
from popxl.streams import Stream
from popxl.tensor import Tensor
from popxl.utils import is_uniform

from popxl_engine.kernels.dtypes import from_numpy
from popxl_engine.machine.laps import Laps
from popxl_engine.machine.lifetimes import Lifetimes, RowId
from popxl_engine.machine.memory import Rows
from popxl_engine.machine.paging import PagedBuffer

Arrays = Mapping[Stream, torch.Tensor]


@dataclass
class Traffic:
    """What a replica has moved since it was made, in bytes. A row stored to where it was loaded
    from counts, though it is free.
    """

    loads: int = 0
    loaded_bytes: int = 0
    stores: int = 0
    stored_bytes: int = 0
    collectives: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = field(default_factory=dict)
    """(op, members of the group) -> (calls, bytes that this replica brought)."""

    def count_collective(
        self, name: str, members: tuple[int, ...], operands: Iterable[torch.Tensor]
    ) -> None:
        """Count a collective."""
        times, brought = self.collectives.get((name, members), (0, 0))
        self.collectives[name, members] = times + 1, brought + sum(t.nbytes for t in operands)


class Replica:
    """The machine's handle: kernels with host or remote effects get it as their first parameter."""

    def __init__(self, index: int, rows: Mapping[RemoteBuffer, Rows | PagedBuffer]):
        self.index = index
        """The index among all replicas, over all processes."""
        self.rows = rows
        self.state: dict[Tensor, torch.Tensor] = {}
        """Variables, and shards of variables, that live on the device."""
        self.rng_path = 0
        """The place of the program: a number made from the run, and from the loops and branches
        that it is in.
        """
        self.traffic = Traffic()
        self.laps: Laps | None = None
        self._inputs: Arrays = {}
        self._outputs: Arrays = {}
        self._position: dict[Stream, int] = {}
        self._over_after: Mapping[int, RowId] = {}
        self._uses = 0
        """Loads and stores of rows in this run so far."""

    def begin(self, inputs: Arrays, outputs: Arrays, rng_path: int = 0) -> None:
        """Start a run: each stream's array is ``[transfers, *shape]`` for this replica;
        ``rng_path`` numbers the run.
        """
        self._inputs, self._outputs, self._position = inputs, outputs, {}
        self.rng_path = rng_path

    def _next(self, stream: Stream, arrays: Arrays) -> torch.Tensor:
        position = self._position.get(stream, 0)
        array = arrays[stream]
        if position >= array.shape[0]:
            raise RuntimeError(
                f"stream '{stream.tensor_id}': got transfer {position + 1} of a run whose arrays "
                f"hold {array.shape[0]}; expected no more. Set ir.num_host_transfers to the "
                "number of loads and stores that one run makes."
            )
        self._position[stream] = position + 1
        return array[position]

    def host_load(self, stream: Stream) -> torch.Tensor:
        """The next slot of an input stream. The caller must not write to it."""
        return self._next(stream, self._inputs)

    def host_store(self, stream: Stream, t: torch.Tensor) -> None:
        """Fill the next slot of an output stream."""
        self._next(stream, self._outputs).copy_(t)

    def begin_lap(self, label: str) -> None:
        """Count time to a label from here on, where a run's is taken."""
        if self.laps is not None:
            self.laps.begin(self.index, label)

    def remote_load(self, buffer: RemoteBuffer, offset: int) -> torch.Tensor:
        """Row ``offset`` itself; whoever needs it unchanged copies."""
        rows, traffic = self.rows[buffer], self.traffic
        traffic.loads += 1
        traffic.loaded_bytes += rows.row_bytes
        row = rows.load(offset)
        self._uses += 1
        if self._uses in self._over_after:
            self._forget(buffer, offset)
        return row

    def remote_store(self, buffer: RemoteBuffer, offset: int, held: list[torch.Tensor]) -> None:
        """Write row ``offset`` from the one tensor in a list, and take it out.

        Storing a row into itself is free, and so is a tensor that only the list has: its memory
        becomes the row's.
        """
        rows, traffic = self.rows[buffer], self.traffic
        traffic.stores += 1
        traffic.stored_bytes += rows.row_bytes
        rows.donate(offset, held)
        self._uses += 1
        if self._uses in self._over_after:
            self._forget(buffer, offset)

    @contextmanager
    def forgetting(self, lifetimes: Lifetimes | None) -> Iterator[None]:
        """A block around a run: rows that do not move give up their memory when their contents are
        over.
        """
        self._uses = 0
        if lifetimes is None:
            yield
            return
        for row in lifetimes.over_before:
            self._release(*row)
        self._over_after = lifetimes.over_after
        try:
            yield
        finally:
            self._over_after = {}

    def _forget(self, buffer: RemoteBuffer, offset: int) -> None:
        """Give up the row that was used just now."""
        row = self._over_after[self._uses]
        assert row == (buffer, offset), "a run takes rows in the order that was found before"
        self._release(buffer, offset)

    def _release(self, buffer: RemoteBuffer, offset: int) -> None:
        rows = self.rows[buffer]
        assert not isinstance(rows, PagedBuffer), "the memory of rows that move is the cache's"
        rows.release(offset)


def as_tensor(array: Any) -> torch.Tensor:
    """A numpy array's memory as a tensor; a copy where the array is read-only or its strides are
    none of torch's.
    """
    if is_uniform(array):
        return as_tensor(array[(0,) * array.ndim]).expand(array.shape)
    array = np.asarray(array, order="C")
    return from_numpy(array if array.flags.writeable else array.copy())
