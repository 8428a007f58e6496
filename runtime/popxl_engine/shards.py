"""Which replica holds which piece of a sharded tensor, so that its elements have their numbers in
the whole one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from popxl.ir import Ir
from popxl.opdef import OpDefinition
from popxl.replica_grouping import ReplicaGrouping, shard_groups
from popxl.tensor import TensorSpec


@dataclass(frozen=True)
class Sharding:
    """A value of each group is cut into ``pieces`` equal pieces, as
    `popxl.replica_grouping.shard_groups` says.
    """

    grouping: ReplicaGrouping
    pieces: int

    def starts(self, length: int) -> tuple[int, ...]:
        """The start of each replica's piece of ``length`` elements in the unsharded tensor."""
        positions = [0] * len(self.grouping.assignment)
        for members in shard_groups(self.grouping, self.pieces).groups:
            for i, replica in enumerate(members):
                positions[replica] = i
        return tuple(p * length for p in positions)


def shardings(ir: Ir) -> dict[Any, Sharding]:
    """The shardings that variables declare: of shards on the device, and of remote buffers."""
    found: dict[Any, Sharding] = {}
    for variable in ir.main_graph.variables:
        if variable.shard is not None:
            found[variable.shard] = Sharding(variable.replica_grouping, variable.shard_over)
        elif variable.location_info is not None and variable.location_info.shard_over > 1:
            found[variable.location_info.buffer] = Sharding(
                variable.replica_grouping, variable.location_info.shard_over
            )
    return found


def result_sharding(
    definition: OpDefinition,
    arguments: Mapping[str, Any],
    spec: TensorSpec,
    operands: Iterable[Sharding | None],
    declared: Mapping[Any, Sharding],
    everyone: ReplicaGrouping,
) -> Sharding | None:
    """How an op's result is sharded; None for a whole tensor, and where no variable says how the
    buffer is.

    Args:
        operands: shardings of its tensor operands.
        declared: what `shardings` gave.
        everyone: the group of collectives that name none.
    """
    if not spec.meta_shape:
        return None
    if "collective" in definition.effects:
        group = arguments.get("group") or everyone
        return Sharding(group, group.group_size)
    if "remote_buffer" in arguments:
        return declared.get(arguments["remote_buffer"])
    return next((s for s in operands if s is not None), None)
