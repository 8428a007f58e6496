"""Replicated tensor sharding: each replica of a group keeps one piece of a value that they
share.
"""

from collections.abc import Callable

import popxl
from popxl import ReplicaGrouping, Tensor, TensorSpec, ops
from popxl.ops.collectives import CollectiveOps
from popxl.sharing import sharing_of

from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.named_replica_grouping import NamedReplicaGrouping
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.utils import null_context


def replica_sharded_spec(t: Tensor, shard_over: ReplicaGrouping) -> TensorSpec:
    """Spec of one replica's shard of ``t``: ``[elements / size]`` with meta_shape.

    It is t's own spec when t is a shard already, the group has one member, or the elements do not
    divide.
    """
    size = shard_over.group_size
    if t.meta_shape or size == 1 or t.nelms % size:
        return t.spec
    return TensorSpec((t.nelms // size,), t.dtype, t.shape)


def shards_of(t: Tensor | TensorSpec, grouping: ReplicaGrouping | None = None) -> int:
    """How many replicas of a group the variable of a shard is cut over; 1 where ``t`` is whole.

    A variable's shard, and inputs of graphs that stand for it, know. Else it follows from sizes,
    but of so few elements that the last pieces may be padding alone.

    Args:
        grouping: the variable's; default: all replicas.
    Raises:
        ValueError: sizes fit several numbers.
    """
    if not t.meta_shape:
        return 1
    if isinstance(t, Tensor) and (known := sharing_of(t).shard_over) is not None:
        return known
    size = (popxl.gir().replica_grouping() if grouping is None else grouping).group_size
    whole = ops.multiply_tuple(t.meta_shape)
    fits = [n for n in range(2, size + 1) if size % n == 0 and -(-whole // n) == t.nelms]
    if len(fits) > 1:
        raise ValueError(
            f"shards_of: got {t.nelms} of {whole} elements, which a shard over any of {fits} of "
            f"{size} replicas has; expected one that says which. Pass the shard of "
            "popxl.replica_sharded_variable, or an input that its VariableFactory made."
        )
    return fits[0] if fits else -(-whole // t.nelms)


def gather_replica_sharded_tensor(
    t: Tensor, use_io_tiles: bool = False, replica_group: ReplicaGrouping | None = None
) -> Tensor:
    """The whole tensor from its shards; ``t`` itself when it is no shard."""
    if not t.meta_shape:
        return t
    with popxl.io_tiles() if use_io_tiles else null_context():
        return ops.collectives.replicated_all_gather(t, group=replica_group)


def reduce_replica_sharded_tensor(
    t: Tensor,
    op: CollectiveOps = "add",
    replica_group: ReplicaGrouping | None = None,
    shard_group: ReplicaGrouping | None = None,
) -> Tensor:
    """Reduce over ``replica_group`` (default: all replicas) and keep this replica's shard over
    ``shard_group``.

    One reduce-scatter where the groups are equal, else an all-reduce and a slice. Where the
    elements do not divide, or the shard group has one member, the result is the whole reduced
    tensor. A group of one costs nothing.
    """
    everyone = popxl.gir().replica_grouping()
    replica_group = everyone if replica_group is None else replica_group
    shard_group = replica_group if shard_group is None else shard_group
    is_sharded = shard_group.group_size > 1 and t.nelms % shard_group.group_size == 0
    if is_sharded and shard_group == replica_group:
        return ops.collectives.replicated_reduce_scatter(t, op, replica_group, True)
    if replica_group.group_size > 1 or op == "square_add":
        t = ops.collectives.replicated_all_reduce(t, op, replica_group)
    return ops.collectives.replica_sharded_slice(t, shard_group) if is_sharded else t


def all_gather_replica_sharded_graph(
    tensors: NamedTensors,
    use_io_tiles: bool = False,
    replica_groups: NamedReplicaGrouping | None = None,
) -> tuple[GraphWithNamedArgs, list[str]]:
    """A graph that gathers every named tensor that is a shard: (graph, names of its outputs,
    sorted).
    """

    def gather(name: str, t: Tensor) -> Tensor:
        group = replica_groups.get(name) if replica_groups is not None else None
        return gather_replica_sharded_tensor(t, use_io_tiles, group)

    return _graph_of_each("all_gather", tensors, gather)


def reduce_replica_sharded_graph(
    tensors: NamedTensors,
    op: CollectiveOps = "add",
    use_io_tiles: bool = False,
    shard_groups: NamedReplicaGrouping | None = None,
    replica_group: ReplicaGrouping | None = None,
) -> tuple[GraphWithNamedArgs, list[str]]:
    """A graph of `reduce_replica_sharded_tensor` for every named tensor: (graph, names of its
    outputs, sorted).
    """

    def reduce(name: str, t: Tensor) -> Tensor:
        shard_group = shard_groups.get(name) if shard_groups is not None else None
        with popxl.io_tiles() if use_io_tiles else null_context():
            return reduce_replica_sharded_tensor(t, op, replica_group, shard_group)

    return _graph_of_each("reduce", tensors, reduce)


def _graph_of_each(
    graph_name: str, tensors: NamedTensors, fn: Callable[[str, Tensor], Tensor]
) -> tuple[GraphWithNamedArgs, list[str]]:
    """A graph with one named input per tensor, in name order, and the outputs ``fn(name,
    input)``.
    """
    names, found = tensors.unpack()
    graph = popxl.gir().create_empty_graph(graph_name)
    inputs: list[Tensor] = []
    with graph:
        for name, t in zip(names, found):
            inputs.append(
                popxl.graph_input(t.shape, t.dtype, name, meta_shape=t.meta_shape or None)
            )
        for name, t in zip(names, inputs):
            popxl.graph_output(fn(name, t))
    return GraphWithNamedArgs(graph, NamedTensors.pack(names, inputs)), names
