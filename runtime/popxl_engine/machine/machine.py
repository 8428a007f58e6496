"""All replicas of this process with their state: how host values get there, and how they come back.

Reading is collective in a program over several processes: each needs what the others hold.
"""

import hashlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

import numpy as np
import torch
from popxl.remote_buffer import RemoteBuffer
from popxl.replica_grouping import shard_groups
from popxl.tensor import Tensor, Variable

from popxl_engine.kernels.dtypes import as_array, from_numpy, torch_dtype
from popxl_engine.machine.device import PROCESSOR, Device
from popxl_engine.machine.fabric import Fabric
from popxl_engine.machine.lifetimes import Lifetimes
from popxl_engine.machine.mapped_files import can_be_mapped, watch
from popxl_engine.machine.memory import Rows
from popxl_engine.machine.paging import (
    Cache,
    PagedBuffer,
    Paging,
    Tenant,
    budget_of,
    make_paged_buffer,
    shared_bytes,
)
from popxl_engine.machine.replica import Replica, as_tensor


class Machine:
    """State of the replicas that this process runs. Variables move here from their host arrays,
    which are dropped.

    Args:
        replicas: of this process.
        fabric: reaches the others.
        paging: how remote rows come and go; without it they are used where they are.
        device: where variables are.
        lifetimes: of rows that do not move; without it they keep their memory from run to run.
    """

    def __init__(
        self,
        buffers: Iterable[RemoteBuffer],
        replicas: Iterable[int],
        fabric: Fabric | None = None,
        paging: Paging | None = None,
        device: Device = PROCESSOR,
        lifetimes: Lifetimes | None = None,
    ):
        buffers, replicas = tuple(buffers), tuple(replicas)
        self.fabric, self.device, self.lifetimes = fabric, device, lifetimes
        self.caches: list[Cache] = []
        """The caches of the replicas in order, where their rows come and go."""
        self.files: set[Variable] = set()
        """Variables whose memory-mapped file is their row."""
        self.replicas: list[Replica] = []
        self._turn: Callable[[], AbstractContextManager[None]] = nullcontext
        tenant = self._tenant(paging, buffers, len(replicas)) if paging is not None else None
        weakref.finalize(self, close, self.caches)
        for index in replicas:
            self.replicas.append(Replica(index, self._rows(buffers, paging, len(replicas), tenant)))

    def _tenant(self, paging: Paging, buffers: Sequence[RemoteBuffer], replicas: int) -> Tenant:
        """Have other sessions of the process make room for the rows that come and go."""
        tenant, budget = Tenant(paging.memory), budget_of(paging.what, paging.device.where)
        budget.make_room(tenant, shared_bytes(paging, buffers, replicas))
        self._turn = partial(budget.turn, tenant)
        return tenant

    def _rows(
        self,
        buffers: Sequence[RemoteBuffer],
        paging: Paging | None,
        replicas: int,
        tenant: Tenant | None,
    ) -> Mapping[RemoteBuffer, Rows | PagedBuffer]:
        """A replica's remote memory."""
        if paging is None or tenant is None:
            return {
                b: Rows(b.tensor_shape, torch_dtype(b.tensor_dtype), b.entries) for b in buffers
            }
        rows, memory = make_paged_buffer(paging, buffers, replicas)
        tenant.memories.append(memory)
        self.caches.append(memory.cache)
        return rows

    def turn(self) -> AbstractContextManager[None]:
        """A block around what a program does: rows that come and go have their memory, which
        sessions of a process share.
        """
        return self._turn()

    @contextmanager
    def run(self) -> Iterator[None]:
        """A block around a run of all replicas."""
        for cache in self.caches:
            cache.begin()
        try:
            with ExitStack() as stack:
                for replica in self.replicas:
                    stack.enter_context(replica.forgetting(self.lifetimes))
                yield
        finally:
            for cache in self.caches:
                cache.leave()
        for cache in self.caches:
            cache.check()

    def keep(self, tensor: Tensor) -> None:
        """Make room on the device for a tensor that is kept from run to run and is no variable."""
        for replica in self.replicas:
            replica.state[tensor] = torch.zeros(
                tensor.shape, dtype=torch_dtype(tensor.dtype), device=self.device.where
            )

    def take_over(self, variable: Variable, adopt_file: bool = True) -> None:
        """Move a variable's host value into the replicas' memory.

        With ``adopt_file`` a writable file becomes that memory.
        """
        data = variable.host_value
        if data is None:
            return
        if isinstance(data, np.memmap):
            watch(data)
        if (
            adopt_file
            and isinstance(data, np.memmap)
            and data.flags.writeable
            and self._adopt(variable, data)
        ):
            self.files.add(variable)
            return
        self.write(variable, data)
        if not isinstance(data, np.memmap):
            variable.host_value = None

    def _adopt(self, variable: Variable, data: np.ndarray) -> bool:
        """Use a memory-mapped file as the row itself, where it can be."""
        if not can_be_mapped(variable, len(self.replicas)):
            return False
        location = variable.location_info
        assert location is not None
        rows = self.replicas[0].rows[location.buffer]
        if not isinstance(rows, Rows) or variable.dtype.as_numpy() != data.dtype:
            return False
        value = (
            data[variable.replica_grouping.assignment[self.replicas[0].index]]
            if self._has_groups(variable)
            else data
        )
        row = from_numpy(value)
        if row.shape != rows.shape and not row.is_contiguous():
            return False
        rows.adopt(location.offset, row.reshape(rows.shape))
        return True

    @staticmethod
    def _has_groups(variable: Variable) -> bool:
        return variable.replica_grouping.num_groups > 1

    def write(self, variable: Variable, data: np.ndarray) -> None:
        """Set a variable on every replica from an array of its `shape_on_host`, or from what `read`
        gave.
        """
        assignment = variable.replica_grouping.assignment
        by_replica = variable.retrieval_mode == "all_replicas" and data.shape == (
            len(assignment),
            *variable.shape,
        )
        values = data if by_replica or self._has_groups(variable) else data[np.newaxis]
        for replica in self.replicas:
            value = values[replica.index if by_replica else assignment[replica.index]]
            self._place(variable, replica, as_tensor(value).reshape(variable.shape))

    def _place(self, variable: Variable, replica: Replica, value: torch.Tensor) -> None:
        location = variable.location_info
        over = location.shard_over if location is not None else variable.shard_over
        index = 0
        if over > 1:
            index = self._holders(variable, over, replica.index).index(replica.index)
        if location is not None:
            rows = replica.rows[location.buffer]
            piece = piece_of(value, index, math.prod(rows.shape))
            rows.store(location.offset, piece.reshape(rows.shape))
            return
        home: Tensor = variable.shard if variable.shard is not None else variable
        if home not in replica.state:
            replica.state[home] = torch.empty(
                home.shape, dtype=torch_dtype(home.dtype), device=self.device.where
            )
        replica.state[home].copy_(piece_of(value, index, home.nelms).reshape(home.shape))

    @staticmethod
    def _holders(variable: Variable, over: int, replica: int) -> list[int]:
        """The replicas with which one holds a copy of a sharded variable's value, in the order of
        the pieces.
        """
        groups = shard_groups(variable.replica_grouping, over)
        return groups.groups[groups.assignment[replica]]

    def read(self, variable: Variable) -> np.ndarray:
        """A variable's value as a host array: one per group, or with retrieval mode "all_replicas"
        one per replica.

        In a group the value is its first replica's, wherever that lives: every process must call
        this.
        """
        grouping = variable.replica_grouping
        if variable.retrieval_mode == "all_replicas":
            return np.stack(
                [self._whole(variable, replica) for replica in range(len(grouping.assignment))]
            )
        values = [self._whole(variable, members[0]) for members in grouping.groups]
        return np.stack(values) if len(values) > 1 else values[0]

    def _whole(self, variable: Variable, index: int) -> np.ndarray:
        location = variable.location_info
        over = location.shard_over if location is not None else variable.shard_over
        members = self._holders(variable, over, index) if over > 1 else [index]
        pieces = [self._piece(variable, m) for m in members]
        whole = np.concatenate([piece.reshape(-1) for piece in pieces])
        return whole[: variable.nelms].reshape(variable.shape)

    def _piece(self, variable: Variable, index: int) -> np.ndarray:
        """What one replica holds."""
        holder = next((r for r in self.replicas if r.index == index), None)
        piece = self._held(variable, holder or self.replicas[0])
        if self.fabric is not None:
            piece = self.fabric.broadcast(piece if holder is not None else None, piece, index)
        return as_array(piece)

    def digest(self, variable: Variable, replica: Replica) -> str:
        """Hash of the bytes that a replica of this process holds of a variable."""
        held = self._held(variable, replica).reshape(-1).contiguous()
        return hashlib.blake2b(held.view(torch.uint8).numpy().data, digest_size=8).hexdigest()

    @staticmethod
    def _held(variable: Variable, replica: Replica) -> torch.Tensor:
        """A replica's value of a variable, on the host."""
        location = variable.location_info
        if location is not None:
            return replica.rows[location.buffer].load(location.offset).cpu()
        return replica.state[variable.shard if variable.shard is not None else variable].cpu()


def close(caches: Sequence[Cache]) -> None:
    """End what works for a machine that is gone."""
    for cache in caches:
        cache.close()


def piece_of(value: torch.Tensor, index: int, size: int) -> torch.Tensor:
    """Piece ``index`` of a flattened value that is cut into pieces of a size; zeros follow its
    end.
    """
    piece = value.reshape(-1)[index * size : (index + 1) * size]
    missing = size - piece.numel()
    return torch.nn.functional.pad(piece, (0, missing)) if missing else piece
