"""Graphs that move a layer's tensors: load, gather, reduce, store. Each is a record that is called
like a function.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import popxl
import popxl_addons as addons
from popxl import RemoteBuffer, ReplicaGrouping, Tensor, TensorSpec, ops
from popxl_addons.named_replica_grouping import NamedReplicaGrouping
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.remote import NamedRemoteBuffers
from popxl_addons.rts import all_gather_replica_sharded_graph

from popxl_gpt.execution.train_state import Rounding
from popxl_gpt.modelling.layout import Layout
from popxl_gpt.utils.runtime import (
    float8_e4m3fn,
    round_from,
    wide_all_reduce,
    wide_reduce_scatter,
    with_scale,
)

Row = int | Tensor


@dataclass(frozen=True, eq=False)
class Load:
    """Loads one row of several remote buffers."""

    graph: addons.GraphWithNamedArgs
    names: tuple[str, ...]

    @classmethod
    def of(cls, buffers: NamedRemoteBuffers, rows: int) -> "Load":
        """Loads from these buffers, which have at least that many rows."""
        graph, names = addons.load_remote_graph(buffers, rows)
        return cls(graph, tuple(names))

    @classmethod
    def in_types(cls, buffers: NamedRemoteBuffers, types: Mapping[str, popxl.dtype]) -> "Load":
        """Loads from these buffers, each tensor cast to its type before the next one comes."""
        names, found = buffers.unpack()
        graph = popxl.gir().create_empty_graph("load")
        with graph:
            row = popxl.graph_input((), popxl.int32, "load_index")
            for name, buffer in zip(names, found):
                t = ops.remote_load(buffer, row, name)
                popxl.graph_output(t if t.dtype is types[name] else ops.cast(t, types[name]))
        return cls(addons.GraphWithNamedArgs(graph), tuple(names))

    def __call__(self, row: Row) -> NamedTensors:
        """The row's tensors, by the buffers' names."""
        return NamedTensors.pack(self.names, self.graph.call(row))

    @property
    def results(self) -> NamedTensors:
        """What the graph gives, as tensors of the graph: for their shapes and types."""
        return NamedTensors.pack(self.names, self.graph.graph.outputs)


@dataclass(frozen=True, eq=False)
class Store:
    """Stores tensors to one row of the buffers of the same names."""

    graph: addons.GraphWithNamedArgs
    """The graph, which is called with the row, and with a seed where it rounds."""

    @classmethod
    def of(cls, buffers: NamedRemoteBuffers, rows: int) -> "Store":
        """Stores to these buffers, which have at least that many rows."""
        return cls(addons.store_remote_graph(buffers, rows))

    @classmethod
    def rounding(cls, buffers: NamedRemoteBuffers) -> "Store":
        """Stores float32 tensors to these buffers of 16 bits, each rounded at random, without bias.

        The bits follow from the seed, the buffer's place among the others, and the element's index
        in the tensor that shards are cut from. So they are the same whether rows are sharded or
        not, for all data-parallel replicas, and however replicas are spread over processes. A
        replica of a tensor-parallel group counts from the first element of its own part.
        """
        names, found = buffers.unpack()
        graph = popxl.gir().create_empty_graph("rounding_store")
        inputs: list[Tensor] = []
        with graph:
            row = popxl.graph_input((), popxl.int32, "store_index")
            seed = popxl.graph_input((2,), popxl.uint32, "seed")
            round_from(graph, seed)
            for name, buffer in zip(names, found):
                t = popxl.graph_input(
                    buffer.tensor_shape, popxl.float32, name, meta_shape=buffer.meta_shape or None
                )
                inputs.append(t)
                # a cast is to the nearest, and what an update writes is rounded at random
                narrow = ops.cast(t, buffer.tensor_dtype)
                ops.remote_store(buffer, row, ops.var_updates.copy_var_update_(narrow, t))
        return cls(addons.GraphWithNamedArgs(graph, NamedTensors.pack(names, inputs)))

    @classmethod
    def narrowing(
        cls,
        wide: TensorSpec,
        name: str,
        buffers: "tuple[RemoteBuffer, RemoteBuffer]",
        layout: Layout,
    ) -> "Store":
        """Stores a tensor like this, or a shard of it, rounded to 8 bits, and the largest magnitude
        of all replicas' parts, to these two buffers.
        """
        graph = popxl.gir().create_empty_graph("narrowing_store")
        with graph:
            row = popxl.graph_input((), popxl.int32, "store_index")
            t = popxl.graph_input(wide.shape, wide.dtype, name, meta_shape=wide.meta_shape or None)
            for buffer, each in zip(buffers, with_scale(t, float8_e4m3fn, layout.everyone)):
                ops.remote_store(buffer, row, each)
        return cls(addons.GraphWithNamedArgs(graph, NamedTensors.pack([name], [t])))

    def __call__(self, tensors: NamedTensors, row: Row, rounding: Rounding = "nearest") -> None:
        """Store the tensors for which there are buffers; others are left out.

        Args:
            rounding: the seed where it rounds; each row of a buffer draws from another one.
        """
        seed = [rounding] if isinstance(rounding, Tensor) else []
        self.graph.bind(tensors).call(row, *seed)


@dataclass(frozen=True, eq=False)
class Gather:
    """Makes whole tensors of shards. Without shards there is no graph, and tensors pass through."""

    graph: addons.GraphWithNamedArgs | None
    names: tuple[str, ...]

    @classmethod
    def of(cls, shards: NamedTensors, groups: NamedReplicaGrouping) -> "Gather":
        """Gathers tensors like these, each over its group."""
        if not any(t.meta_shape for t in shards.values_flat()):
            return cls(None, ())
        graph, names = all_gather_replica_sharded_graph(shards, replica_groups=groups)
        return cls(graph, tuple(names))

    def __call__(self, shards: NamedTensors) -> NamedTensors:
        """The whole tensors, by the same names."""
        return (
            shards
            if self.graph is None
            else NamedTensors.pack(self.names, self.graph.bind(shards).call())
        )


@dataclass(frozen=True, eq=False)
class Reduce:
    """Means of tensors over the data-parallel group, cut into shards. Without replicas tensors pass
    through.
    """

    graph: addons.GraphWithNamedArgs | None
    names: tuple[str, ...]

    @classmethod
    def of(
        cls,
        tensors: NamedTensors,
        shard_groups: NamedReplicaGrouping,
        dp: ReplicaGrouping,
        precision: popxl.dtype,
    ) -> "Reduce":
        """Reduces tensors like these; each is cut over its own group.

        Args:
            precision: the type in which they travel: theirs, or one that each replica rounds its
                own to, to the nearest, before float32 sums.
        """
        is_local = dp.group_size == 1 and all(
            group.group_size == 1 for group in shard_groups.values_flat()
        )
        if is_local or not tensors.len():
            return cls(None, ())
        names, found = tensors.unpack()
        graph = popxl.gir().create_empty_graph("reduce")
        with graph:
            inputs = [popxl.graph_input(t.shape, t.dtype, name) for name, t in zip(names, found)]
            # The largest first: replicas of one process need not hold it while they wait for each
            # other.
            order = sorted(zip(names, inputs), key=lambda named: -named[1].nelms)
            reduced = {name: _reduced(t, shard_groups[name], dp, precision) for name, t in order}
            for name in names:
                popxl.graph_output(reduced[name])
        return cls(addons.GraphWithNamedArgs(graph, NamedTensors.pack(names, inputs)), tuple(names))

    def __call__(self, tensors: NamedTensors) -> NamedTensors:
        """The reduced tensors, by the same names."""
        return (
            tensors
            if self.graph is None
            else NamedTensors.pack(self.names, self.graph.bind(tensors).call())
        )


def _reduced(
    t: Tensor, shard_group: ReplicaGrouping, dp: ReplicaGrouping, precision: popxl.dtype
) -> Tensor:
    """Mean over the data-parallel group, cut into shards."""
    if dp.group_size > 1:
        is_narrow = precision is not t.dtype
        t = ops.cast(t, precision) if is_narrow else t
        if shard_group == dp:
            return (
                wide_reduce_scatter(t, "mean", dp)
                if is_narrow
                else ops.collectives.replicated_reduce_scatter(t, "mean", dp, True)
            )
        reduce = wide_all_reduce if is_narrow else ops.collectives.replicated_all_reduce
        t = reduce(t, "mean", dp)
    return (
        ops.collectives.replica_sharded_slice(t, shard_group) if shard_group.group_size > 1 else t
    )


def shard_length(elements: int, group_size: int) -> int:
    """Elements of a shard; the last shards are padded."""
    return -(-elements // group_size)


def shard_spec(whole: TensorSpec, group: ReplicaGrouping) -> TensorSpec:
    """One replica's shard of a tensor: [shape] -> [ceil(elements / group size)]. In a group of one
    it is the tensor.
    """
    if group.group_size == 1:
        return whole
    return TensorSpec(
        (shard_length(ops.multiply_tuple(whole.shape), group.group_size),), whole.dtype, whole.shape
    )


def selected(buffers: NamedRemoteBuffers, names: tuple[str, ...]) -> NamedRemoteBuffers:
    """The buffers with these (dotted) names."""
    found = buffers.to_dict()
    return NamedRemoteBuffers.from_dict({name: found[name] for name in names})


def first_row() -> Tensor:
    """Row 0, as a tensor of the current graph."""
    return popxl.constant(0, popxl.int32, "row")
