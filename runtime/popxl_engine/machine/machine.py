"""All replicas of this process with their state: how host values get there, and how they come back."""

from typing import Any, Dict, Iterable, List, Sequence, Set

import numpy as np
import torch
from popxl.remote_buffer import RemoteBuffer
from popxl.tensor import Variable
from popxl.values import Tensor

from popxl_engine.kernels.dtypes import torch_dtype
from popxl_engine.machine.memory import Rows
from popxl_engine.machine.replica import Replica, as_array, as_tensor


class Machine:
    """State of the replicas that this process runs. Variables move here from their host arrays, which are dropped."""

    def __init__(self, buffers: Iterable[RemoteBuffer], replicas: Iterable[int]):
        buffers = tuple(buffers)
        self.files: Set[Variable] = set()
        """Variables whose memory-mapped file is their row."""
        self.replicas: List[Replica] = [
            Replica(index, {b: Rows(b.tensor_shape, torch_dtype(b.tensor_dtype), b.entries) for b in buffers})
            for index in replicas
        ]

    def take_over(self, variable: Variable, adopt_file: bool = True) -> None:
        """Move a variable's host value into the replicas' memory.

        With ``adopt_file`` a writable file becomes that memory.
        """
        data = variable.host_value
        if data is None:
            return
        if adopt_file and isinstance(data, np.memmap) and data.flags.writeable and self._adopt(variable, data):
            self.files.add(variable)
            return
        self.write(variable, data)
        if not isinstance(data, np.memmap):
            variable.host_value = None

    def _adopt(self, variable: Variable, data: np.ndarray) -> bool:
        """Use a memory-mapped file as the row itself, where one replica holds the whole value in the file's format."""
        place = variable.location_info
        if place is None or place.shard_over > 1 or len(self.replicas) > 1 or variable.dtype.as_numpy() != data.dtype:
            return False
        if str(variable.dtype.name) == "bfloat16":
            return False
        value = (
            data[variable.replica_grouping.assignment[self.replicas[0].index]] if self._has_groups(variable) else data
        )
        self.replicas[0].rows[place.buffer].adopt(place.offset, torch.from_numpy(value))
        return True

    @staticmethod
    def _has_groups(variable: Variable) -> bool:
        return variable.replica_grouping.num_groups > 1

    def write(self, variable: Variable, data: np.ndarray) -> None:
        """Set a variable on every replica from an array of its `shape_on_host`, or from what `read` gave."""
        by_replica = variable.retrieval_mode == "all_replicas" and data.shape == (len(self.replicas), *variable.shape)
        values = data if by_replica or self._has_groups(variable) else data[np.newaxis]
        for i, replica in enumerate(self.replicas):
            value = values[i if by_replica else variable.replica_grouping.assignment[replica.index]]
            self._place(variable, replica, as_tensor(value).reshape(variable.shape))

    def _place(self, variable: Variable, replica: Replica, value: torch.Tensor) -> None:
        for target, piece in self._pieces(variable, replica, value):
            target.copy_(piece)

    def _pieces(self, variable: Variable, replica: Replica, value: torch.Tensor) -> Sequence[Any]:
        place = variable.location_info
        over = place.shard_over if place is not None else variable.shard_over
        piece = shard(value, over, self._position(variable, replica) % over) if over > 1 else value
        if place is not None:
            return [(replica.rows[place.buffer].row(place.offset), piece)]
        home: Tensor = variable.shard if variable.shard is not None else variable
        if home not in replica.state:
            replica.state[home] = torch.empty(home.shape, dtype=torch_dtype(home.dtype))
        return [(replica.state[home], piece.reshape(home.shape))]

    @staticmethod
    def _position(variable: Variable, replica: Replica) -> int:
        grouping = variable.replica_grouping
        return grouping.groups[grouping.assignment[replica.index]].index(replica.index)

    def read(self, variable: Variable) -> np.ndarray:
        """A variable's value as a host array: one per group, or with retrieval mode "all_replicas" one per replica."""
        by_replica: Dict[int, Replica] = {r.index: r for r in self.replicas}
        groups = variable.replica_grouping.groups
        if variable.retrieval_mode == "all_replicas":
            return np.stack([self._whole(variable, r, by_replica) for r in sorted(by_replica)])
        values = [self._whole(variable, members[0], by_replica) for members in groups]
        return np.stack(values) if len(values) > 1 else values[0]

    def _whole(self, variable: Variable, index: int, replicas: Dict[int, Replica]) -> np.ndarray:
        place = variable.location_info
        over = place.shard_over if place is not None else variable.shard_over
        members = [index]
        if over > 1:
            grouping = variable.replica_grouping
            group = grouping.groups[grouping.assignment[index]]
            first = group.index(index) // over * over
            members = group[first : first + over]
        pieces = [self._piece(variable, replicas[m]) for m in members]
        if over > 1:
            return np.concatenate(pieces)[: variable.nelms].reshape(variable.shape)
        return np.array(pieces[0]).reshape(variable.shape)

    def _piece(self, variable: Variable, replica: Replica) -> np.ndarray:
        place = variable.location_info
        if place is not None:
            return as_array(replica.rows[place.buffer].row(place.offset))  # type: ignore[no-any-return]
        home: Tensor = variable.shard if variable.shard is not None else variable
        return as_array(replica.state[home])  # type: ignore[no-any-return]


def shard(value: torch.Tensor, pieces: int, index: int) -> torch.Tensor:
    """Piece ``index`` of a flattened value that is padded with zeros to ``pieces`` equal parts."""
    flat = value.reshape(-1)
    size = -(-flat.numel() // pieces)
    piece = flat[index * size : (index + 1) * size]
    return torch.nn.functional.pad(piece, (0, size - piece.numel()))
