"""The program of a batch-serialised graph: a repeat whose body loads, calls and stores one step."""

from collections.abc import Callable
from dataclasses import dataclass

import popxl
from popxl import DeviceToHostStream, HostToDeviceStream, RemoteBuffer, ReplicaGrouping, Tensor, ops
from popxl.extensions import stack_seeds
from popxl.ops.collectives import replica_sharded_slice, replicated_all_gather

from popxl_addons.graph import input_like
from popxl_addons.utils import null_context, suffix_graph_name

RowOffset = int | Callable[[Tensor], Tensor] | None


class RemoteHandle:
    """The place that a tensor is loaded from or stored to.

    Args:
        row_offset: added to the row (int); or the row is a function of it; or None: the buffer has
            a single row.
        shard_group: replicas over which a slot holds one shard each.
    """

    def __init__(
        self,
        buffer: RemoteBuffer,
        row_offset: RowOffset = 0,
        shard_group: ReplicaGrouping | None = None,
    ) -> None:
        self.buffer = buffer
        self.row_offset = row_offset
        self.shard_group = shard_group

    @property
    def is_sharded(self) -> bool:
        """Whether slots hold shards."""
        return (
            self.shard_group is not None
            and self.shard_group.group_size > 1
            and bool(self.buffer.meta_shape)
        )

    def __repr__(self) -> str:
        return f"RemoteHandle({self.buffer!r}, row_offset={self.row_offset})"


@dataclass(frozen=True, eq=False)
class SerialPlan:
    """What one step of a batch-serialised graph loads, calls and stores."""

    graph: popxl.Graph
    steps: int
    loads: dict[Tensor, HostToDeviceStream | RemoteHandle]
    store_streams: dict[Tensor, DeviceToHostStream]
    store_buffers: dict[Tensor, RemoteHandle]
    seed: Tensor | None
    use_io_tiles: bool

    @property
    def together(self) -> int:
        """Steps that an iteration does."""
        most = min(self.graph.ir.alternating_steps, self.steps)
        return next(count for count in range(most, 0, -1) if self.steps % count == 0)

    @property
    def handles(self) -> list[RemoteHandle]:
        """Every remote handle."""
        loads = [handle for handle in self.loads.values() if isinstance(handle, RemoteHandle)]
        return [*loads, *self.store_buffers.values()]

    @property
    def passed(self) -> list[Tensor]:
        """The graph's inputs that the caller gives: neither loaded nor the seed."""
        return [t for t in self.graph.inputs if t not in self.loads and t != self.seed]


def repeat_steps(plan: SerialPlan) -> tuple[popxl.Graph, dict[Tensor, Tensor]]:
    """The outer graph, and {original input: its input}. It finds each handle's first slot, then
    repeats one step, or several that may alternate: these find their slots by themselves, so that
    it can be seen that no two are the same.
    """
    ir, name = plan.graph.ir, plan.graph.name
    outer = ir.create_empty_graph(suffix_graph_name(name, "batch_serial"))
    body = ir.create_empty_graph(suffix_graph_name(name, "batch_serial_step"))
    offsets = {
        _offset_key(handle): handle.row_offset
        for handle in plan.handles
        if handle.row_offset is not None
    }
    with outer:
        row = popxl.graph_input((), popxl.int32, "row")
        seed = None if plan.seed is None else _first_seed(plan.graph, plan.seed)
        remap = {t: input_like(plan.graph, t) for t in plan.passed}
        if plan.seed is not None and seed is not None:
            remap[plan.seed] = seed
        passed_on = [row]  # several steps that may alternate find their slots
        if plan.together == 1:
            passed_on = [_moved(row, offset) * plan.steps for offset in offsets.values()]
    with body:
        carried = [popxl.graph_input((), popxl.int32, "step")]
        if seed is not None:
            carried.append(popxl.graph_input(seed.shape, seed.dtype, "seed"))
        inputs = {t: input_like(plan.graph, t) for t in plan.passed}
        given = [popxl.graph_input((), popxl.int32, "first_slot") for _ in passed_on]
        own = given
        if plan.together > 1:
            own = [_moved(given[0], offset) * plan.steps for offset in offsets.values()]
        firsts = dict(zip(offsets, own))
        for _ in range(plan.together):
            carried = _one_step(plan, carried, inputs, firsts)
        for t in carried:
            popxl.graph_output(t)
    with outer:
        connections = {inputs[t]: remap[t] for t in plan.passed}
        connections.update(zip(given, passed_on))
        start = [popxl.constant(0, popxl.int32, "step"), *([seed] if seed is not None else [])]
        ops.repeat(body, plan.steps // plan.together, *start, inputs_dict=connections)
    return outer, remap


def _one_step(
    plan: SerialPlan,
    carried: list[Tensor],
    inputs: dict[Tensor, Tensor],
    firsts: dict[tuple[str, int], Tensor],
) -> list[Tensor]:
    """Load, call, store; returns what the next step starts from: the step's number and the seed."""
    step, *rest = carried
    connections = dict(inputs)
    following = [step + 1]
    if plan.seed is not None:
        connections[plan.seed], next_seed = _split_off(rest[0], plan.seed)
        following.append(next_seed)

    slots = {key: first + step for key, first in firsts.items()}

    def slot(handle: RemoteHandle) -> Tensor:
        return step if handle.row_offset is None else slots[_offset_key(handle)]

    with popxl.io_tiles() if plan.use_io_tiles else null_context():
        for t, handle in plan.loads.items():
            if isinstance(handle, RemoteHandle):
                loaded = ops.remote_load(handle.buffer, slot(handle), t.name)
                connections[t] = (
                    replicated_all_gather(loaded, group=handle.shard_group)
                    if handle.is_sharded and not t.meta_shape
                    else loaded
                )
            else:
                connections[t] = ops.host_load(handle, t.name)
    site = ops.call_with_info(plan.graph, inputs_dict=connections)

    with popxl.io_tiles() if plan.use_io_tiles else null_context():
        for t, stream in plan.store_streams.items():
            ops.host_store(stream, site.graph_to_parent(t))
        for t, handle in plan.store_buffers.items():
            stored = site.graph_to_parent(t)
            if handle.is_sharded and not stored.meta_shape:
                stored = replica_sharded_slice(stored, handle.shard_group)
            ops.remote_store(handle.buffer, slot(handle), stored)
    return following


def _first_seed(graph: popxl.Graph, seed: Tensor) -> Tensor:
    """The outer graph's input from which the steps' seeds are split off."""
    return popxl.graph_input((2,), popxl.uint32, seed.name, by_ref=seed in graph._by_ref_inputs)


def _split_off(seed: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The seed or stacked seeds for one step, split off one after the other, and what is left for
    the next step.
    """
    found = []
    for _ in range(wanted.shape[0] if len(wanted.shape) == 2 else 1):
        own, seed = ops.split_random_seed(seed)
        found.append(own)
    return found[0] if wanted.shape == seed.shape else stack_seeds(found), seed


def _offset_key(handle: RemoteHandle) -> tuple[str, int]:
    """Handles with equal keys have equal slots."""
    offset = handle.row_offset
    return ("function", id(offset)) if callable(offset) else ("number", offset or 0)


def _moved(row: Tensor, offset: int | Callable[[Tensor], Tensor]) -> Tensor:
    if callable(offset):
        return offset(row)
    return row if offset == 0 else row + offset
