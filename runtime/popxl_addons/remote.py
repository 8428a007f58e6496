"""Remote buffers by name, and the graphs that load from them and store to them."""

from collections.abc import Mapping

import popxl
from popxl import ReplicaGrouping, Tensor, TensorSpec, ops

from popxl_addons.dot_tree import DotTree
from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.utils import null_context
from popxl_addons.variable_factory import NamedVariableFactories

__all__ = [
    "load_remote_graph",
    "store_remote_graph",
    "named_buffers",
    "named_variable_buffers",
    "create_remote_buffer",
]


class NamedRemoteBuffers(DotTree[popxl.RemoteBuffer]):
    """Remote buffers by name."""


def create_remote_buffer(
    spec: TensorSpec,
    entries: int = 1,
    replica_group: ReplicaGrouping | None = None,
    shard_over: int | None = None,
) -> popxl.RemoteBuffer:
    """A buffer whose slots hold tensors of ``spec``.

    Args:
        replica_group: replicas that share a value; its size is the default of ``shard_over``.
        shard_over: replicas over which each value is cut: slots are 1-D shards. A spec that is a
            shard already stays.
    Raises:
        ValueError: the elements do not divide over ``shard_over``.
    """
    if shard_over is None:
        shard_over = replica_group.group_size if replica_group is not None else 1
    shape, meta_shape = tuple(spec.shape), tuple(spec.meta_shape)
    if not meta_shape and shard_over > 1:
        elements = ops.multiply_tuple(shape)
        if elements % shard_over:
            raise ValueError(
                f"create_remote_buffer: got {elements} elements {list(shape)} and shard_over "
                f"{shard_over}; expected a divisor of the elements. Pass shard_over=1 to keep the "
                "value whole."
            )
        shape, meta_shape = (elements // shard_over,), shape
    buffer = popxl.remote_buffer(shape, spec.dtype, entries)
    buffer.meta_shape = meta_shape
    return buffer


def named_buffers(tensors: NamedTensors, entries: int = 1) -> NamedRemoteBuffers:
    """A buffer for every tensor."""
    return NamedRemoteBuffers.from_dict(
        {
            name: create_remote_buffer(t.spec, entries, shard_over=1)
            for name, t in tensors.to_dict().items()
        }
    )


def named_variable_buffers(
    factories: NamedVariableFactories,
    entries: int = 1,
    shard_over_dict: Mapping[str, int] | int | bool = True,
) -> NamedRemoteBuffers:
    """A buffer for every factory.

    Args:
        shard_over_dict: replicas over which a value is cut: a number for each name, one number for
            all, True for the size of each variable's group, False for none. A number for all, and
            True, leave whole what does not divide by it.
    Raises:
        ValueError: a number outside 1..group size, one of a name by which its elements do not
            divide, or another type.
    """
    if not isinstance(shard_over_dict, (bool, int, Mapping)):
        raise ValueError(
            "named_variable_buffers: got shard_over_dict of type "
            f"{type(shard_over_dict).__name__}; expected a dict, an int or a bool."
        )
    groups = factories.replica_groupings
    buffers = {}
    for name, factory in factories.to_dict().items():
        spec = TensorSpec(factory.shape, factory.dtype, factory.meta_shape)
        shards = _shards(name, spec, groups[name].group_size, shard_over_dict)
        buffers[name] = create_remote_buffer(spec, entries, groups[name], shards)
    return NamedRemoteBuffers.from_dict(buffers)


def _shards(
    name: str, spec: TensorSpec, group_size: int, choice: Mapping[str, int] | int | bool
) -> int:
    if choice is False:
        return 1
    if choice is True:
        choice = group_size
    shards = choice if isinstance(choice, int) else choice.get(name, 1)
    if not 1 <= shards <= group_size:
        raise ValueError(
            f"named_variable_buffers: got {shards} shards for '{name}'; expected 1 <= shards <= "
            f"{group_size}, the size of its group."
        )
    if isinstance(choice, int) and ops.multiply_tuple(spec.shape) % shards:
        return 1
    return shards


def _load_all(
    buffers: NamedRemoteBuffers, entry: int | Tensor, use_io_tiles: bool
) -> tuple[list[str], list[Tensor]]:
    names, found = buffers.unpack()
    with popxl.io_tiles() if use_io_tiles else null_context():
        return names, [ops.remote_load(buffer, entry, name) for name, buffer in zip(names, found)]


def load_remote(
    buffers: NamedRemoteBuffers, entry: int | Tensor = 0, use_io_tiles: bool = False
) -> NamedTensors:
    """Load slot ``entry`` of every buffer, in the current graph."""
    return NamedTensors.pack(*_load_all(buffers, entry, use_io_tiles))


def load_remote_graph(
    buffers: NamedRemoteBuffers, entries: int = 1, use_io_tiles: bool = False
) -> tuple[GraphWithNamedArgs, list[str]]:
    """A graph that loads one slot of every buffer: (graph, names of its outputs, sorted).

    Its input "load_index" (int32 scalar) is the slot. Buffers grow to at least ``entries`` slots.
    """
    _grow(buffers, entries)

    def load(load_index: Tensor) -> list[Tensor]:
        return _load_all(buffers, load_index, use_io_tiles)[1]

    return GraphWithNamedArgs(
        popxl.gir().create_graph(load, TensorSpec((), popxl.int32))
    ), buffers.unpack()[0]


def store_remote(
    buffers: NamedRemoteBuffers,
    tensors: NamedTensors,
    entry: int | Tensor = 0,
    use_io_tiles: bool = False,
) -> None:
    """Store the tensors to slot ``entry`` of the buffers of the same names, in the current
    graph.
    """
    with popxl.io_tiles() if use_io_tiles else null_context():
        for buffer, t in buffers.to_mapping(tensors).items():
            ops.remote_store(buffer, entry, t)


def store_remote_graph(
    buffers: NamedRemoteBuffers, entries: int = 1, use_io_tiles: bool = False
) -> GraphWithNamedArgs:
    """A graph that stores one slot of every buffer: input "store_index" (int32 scalar), then one
    named input per buffer.

    Buffers grow to at least ``entries`` slots.
    """
    _grow(buffers, entries)
    inputs: dict[str, Tensor] = {}

    def store(store_index: Tensor) -> None:
        for name, buffer in zip(*buffers.unpack()):
            inputs[name] = popxl.graph_input(
                buffer.tensor_shape, buffer.tensor_dtype, name, meta_shape=buffer.meta_shape or None
            )
        store_remote(buffers, NamedTensors.from_dict(inputs), store_index, use_io_tiles)

    graph = popxl.gir().create_graph(store, TensorSpec((), popxl.int32))
    return GraphWithNamedArgs(graph, NamedTensors.from_dict(inputs))


def _grow(buffers: NamedRemoteBuffers, entries: int) -> None:
    for buffer in buffers.values_flat():
        if buffer.entries < entries:
            buffer.entries = entries
