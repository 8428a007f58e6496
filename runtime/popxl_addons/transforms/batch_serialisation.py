"""Run a graph once per micro-batch, with its inputs and outputs in streams and remote buffers.

A buffer holds rows x steps slots, row after row: slot ``row * steps + step``. A row is a layer's
place in a model whose layers share the graph; a step is a micro-batch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import popxl
from popxl import DeviceToHostStream, HostToDeviceStream, RemoteBuffer, ReplicaGrouping, Tensor
from popxl.transforms.autodiff import ExpectedConnectionType
from popxl.transforms.storage import Summaries

from popxl_addons.graph import GraphWithNamedArgs, changed_results
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.remote import create_remote_buffer
from popxl_addons.rts import replica_sharded_spec
from popxl_addons.transforms.serial_steps import RemoteHandle, RowOffset, SerialPlan, repeat_steps
from popxl_addons.utils import null_context  # noqa: F401 - programs import it from here

IoMode = Literal["compute", "io", "io_overlapped"]
RemoteBufferWithOffset = tuple[RemoteBuffer, RowOffset]
LoadHandle = HostToDeviceStream | RemoteBufferWithOffset | RemoteHandle
StoreHandle = RemoteBufferWithOffset | RemoteHandle


@dataclass(frozen=True, eq=False)
class BatchSerialResult:
    """A batch-serialised graph, and where it put what it stored: {original tensor: handle}."""

    graph: GraphWithNamedArgs
    stored_buffers: dict[Tensor, RemoteHandle]
    _remap_dict: dict[Tensor, Tensor]

    def remap_tensors(self, ts: NamedTensors) -> NamedTensors:
        """The same names with the transformed graph's tensors in place of the original's."""
        return ts.remap(self._remap_dict)


def batch_serial_buffer(
    t: Tensor, steps: int = 1, rows: int = 1, shard_group: ReplicaGrouping | None = None
) -> RemoteBuffer:
    """A buffer of rows x steps slots for a tensor, or for its shards when a group is given."""
    spec = t.spec if shard_group is None else replica_sharded_spec(t, shard_group)
    return create_remote_buffer(spec, entries=steps * rows, shard_over=1)


def batch_serialise(
    graph: GraphWithNamedArgs,
    steps: int,
    load_handles: Mapping[Tensor, LoadHandle],
    store_streams: Mapping[Tensor, DeviceToHostStream],
    store_buffers: Mapping[Tensor, StoreHandle],
    seed_input: Tensor | None = None,
    rows: int = 1,
    io_mode: IoMode = "io",
) -> BatchSerialResult:
    """A graph that runs ``graph`` once per step, loading and storing what is named.

    Its inputs are the row (int32 scalar), the seed if there is one, and every input of ``graph``
    that is neither loaded nor the seed, in order. Step i sees the i-th seed split off; a handle's
    slot is ``(row + row_offset) * steps + i``. Where the graph takes n stacked seeds (uint32 [n,
    2], see `popxl.extensions.stack_seeds`), step i sees the seeds of steps n * i to n * i + n - 1
    of a graph that takes one.

    Args:
        load_handles: {input of graph: stream or buffer}.
        store_streams, store_buffers: {tensor of graph: where it goes}; inputs that were loaded from
            a buffer stay there, unless the graph changes them in place.
        seed_input: the input that is a random seed.
        rows: rows in the buffers, which grow to hold them.
        io_mode: where the transfers run. Every mode gives the same values; the engine overlaps
            transfers by itself.
    Raises:
        ValueError: rows < 1, another io_mode, "io" or "io_overlapped" without IO tiles, or a key
        that is not in the graph.
    """
    if io_mode not in ("compute", "io", "io_overlapped"):
        raise ValueError(
            f"batch_serialise: got io_mode {io_mode!r}; expected 'compute', 'io' or "
            "'io_overlapped'."
        )
    if io_mode != "compute" and graph.graph.ir._pb_ir.getSessionOptions().numIOTiles < 1:
        raise ValueError(
            f"batch_serialise: got io_mode '{io_mode}' without IO tiles; expected at least one. "
            "Set ir._pb_ir.getSessionOptions().numIOTiles, or use io_mode='compute'."
        )
    loads = {t: _as_load(handle) for t, handle in load_handles.items()}
    stores = {t: _as_store(handle) for t, handle in store_buffers.items()}
    if io_mode == "io_overlapped" and steps >= 2:
        return batch_serialise_overlapped(
            graph, steps, loads, store_streams, stores, seed_input, rows
        )
    return batch_serialise_non_overlapped(
        graph,
        steps,
        loads,
        store_streams,
        stores,
        seed_input,
        rows,
        use_io_tiles=io_mode != "compute",
    )


def batch_serialise_overlapped(
    graph: GraphWithNamedArgs,
    steps: int,
    load_handles: Mapping[Tensor, HostToDeviceStream | RemoteHandle],
    store_streams: Mapping[Tensor, DeviceToHostStream],
    store_buffers: Mapping[Tensor, RemoteHandle],
    seed_input: Tensor | None = None,
    rows: int = 1,
) -> BatchSerialResult:
    """The "io_overlapped" form. The program is the same: the engine looks ahead of it and writes
    behind it.

    Raises:
        ValueError: for fewer than two steps.
    """
    if steps < 2:
        raise ValueError(
            f"batch_serialise_overlapped: got steps {steps}; expected at least 2, to have "
            "something to overlap."
        )
    return batch_serialise_non_overlapped(
        graph,
        steps,
        load_handles,
        store_streams,
        store_buffers,
        seed_input,
        rows,
        use_io_tiles=True,
    )


def batch_serialise_non_overlapped(
    graph: GraphWithNamedArgs,
    steps: int,
    load_handles: Mapping[Tensor, HostToDeviceStream | RemoteHandle],
    store_streams: Mapping[Tensor, DeviceToHostStream],
    store_buffers: Mapping[Tensor, RemoteHandle],
    seed_input: Tensor | None = None,
    rows: int = 1,
    use_io_tiles: bool = False,
) -> BatchSerialResult:
    """The "compute" and "io" forms."""
    _check_arguments(
        graph.graph, steps, rows, load_handles, [*store_streams, *store_buffers], seed_input
    )
    stay = {t for t, handle in load_handles.items() if isinstance(handle, RemoteHandle)}
    stay -= Summaries().modified_storage(graph.graph)
    plan = SerialPlan(
        graph.graph,
        steps,
        dict(load_handles),
        dict(store_streams),
        {t: handle for t, handle in store_buffers.items() if t not in stay},
        seed_input,
        use_io_tiles,
    )
    for handle in plan.handles:
        _grow(handle, steps, rows)
    result, remap = repeat_steps(plan)
    named = {name: remap[t] for name, t in graph.args.to_dict().items() if t in remap}
    return BatchSerialResult(
        GraphWithNamedArgs(result, NamedTensors.from_dict(named)), dict(plan.store_buffers), remap
    )


def batch_serialise_fwd_and_grad(
    forward_graph: GraphWithNamedArgs,
    gradient_graph: GraphWithNamedArgs,
    named_inputs_for_grad_graph: NamedTensors,
    steps: int,
    load_handles: Mapping[Tensor, LoadHandle],
    store_streams: Mapping[Tensor, DeviceToHostStream],
    store_buffers: Mapping[Tensor, StoreHandle | ReplicaGrouping],
    seed_input: Tensor | None = None,
    rows: int = 1,
    io_mode: IoMode = "io",
) -> tuple[BatchSerialResult, BatchSerialResult]:
    """`batch_serialise` for a graph and its gradient, with the activations that connect them.

    An activation is given by name where it is among ``named_inputs_for_grad_graph``, loaded again
    where the forward graph loads it from a buffer, and otherwise, or where the forward graph
    changes it in place, stored by the forward graph in a buffer of its own.

    Args:
        load_handles, store_streams, store_buffers: as for `batch_serialise`, for tensors of either
            graph. A grouping as handle shards that activation's own buffer.
        named_inputs_for_grad_graph: forward inputs that the gradient's caller passes by name, in
        most cases the variables.
    Raises:
        ValueError: an incoming gradient without a load handle, a key that is in neither graph, or a
            grouping for what gets no buffer of its own.
        RuntimeError: an activation that is neither input nor output of the forward graph.
    """
    fwd, grad = forward_graph.graph, gradient_graph.graph
    for t in (*load_handles, *store_streams, *store_buffers):
        if t not in fwd and t not in grad:
            raise ValueError(
                f"batch_serialise_fwd_and_grad: got a handle for %{t.name}; expected tensors of "
                f"graph '{fwd.name}' or '{grad.name}'. Take those of the gradient graph that is "
                "given here."
            )
    loads = {t: _as_load(handle) for t, handle in load_handles.items()}
    groups = {
        t: handle for t, handle in store_buffers.items() if isinstance(handle, ReplicaGrouping)
    }
    stores = {
        t: _as_store(handle)
        for t, handle in store_buffers.items()
        if not isinstance(handle, ReplicaGrouping)
    }
    fwd_stores = {t: handle for t, handle in stores.items() if t in fwd}
    grad_loads = {t: handle for t, handle in loads.items() if t in grad}
    names = {t: name for name, t in named_inputs_for_grad_graph.to_dict().items()}
    grad_args, own, changed = NamedTensors(), set[int](), changed_results(fwd)

    info = gradient_graph.grad_graph_info
    for t, connection in zip(grad.inputs, info.expected_inputs):
        source = connection.fwd_tensor
        if connection.connection_type == ExpectedConnectionType.FwdGrad:
            if t not in grad_loads:
                raise ValueError(
                    f"batch_serialise_fwd_and_grad: got no load handle for %{t.name}, the "
                    f"gradient of %{source.name}; expected one. Add it to load_handles."
                )
        elif t in grad_loads:
            continue
        elif source in names and source not in changed:
            grad_args._put(names[source], t, own=own)
        else:
            known = {} if source in changed else loads
            grad_loads[t] = _activation_handle(fwd, source, known, fwd_stores, groups, steps, rows)
    grad_args.update(gradient_graph.args)
    for t in groups:
        if t not in fwd_stores:
            raise ValueError(
                f"batch_serialise_fwd_and_grad: got a replica grouping for %{t.name}; expected it "
                "for an activation that gets a buffer of its own. Leave it out."
            )

    fwd_result = batch_serialise(
        forward_graph,
        steps,
        {t: h for t, h in loads.items() if t in fwd},
        {t: h for t, h in store_streams.items() if t in fwd},
        fwd_stores,
        seed_input,
        rows,
        io_mode,
    )
    grad_result = batch_serialise(
        GraphWithNamedArgs(grad, grad_args),
        steps,
        grad_loads,
        {t: h for t, h in store_streams.items() if t in grad},
        {t: h for t, h in stores.items() if t in grad},
        None,
        rows,
        io_mode,
    )
    return fwd_result, grad_result


def _activation_handle(
    fwd: popxl.Graph,
    source: Tensor,
    loads: Mapping[Tensor, HostToDeviceStream | RemoteHandle],
    fwd_stores: dict[Tensor, RemoteHandle],
    groups: Mapping[Tensor, ReplicaGrouping],
    steps: int,
    rows: int,
) -> RemoteHandle:
    """The buffer that the gradient loads an activation from; a new buffer is added to what the
    forward graph stores.
    """
    loaded = loads.get(source)
    if isinstance(loaded, RemoteHandle):
        return loaded
    if source not in fwd_stores:
        if source not in fwd.inputs and source not in fwd.outputs:
            raise RuntimeError(
                f"batch_serialise_fwd_and_grad: got activation %{source.name}, which graph "
                f"'{fwd.name}' does not give; expected an input or output of it. Make the "
                "gradient by autodiff of this graph."
            )
        group = groups.get(source)
        buffer = batch_serial_buffer(source, steps, rows, group)
        fwd_stores[source] = RemoteHandle(buffer, 0, group)
    return fwd_stores[source]


def _as_load(handle: LoadHandle) -> HostToDeviceStream | RemoteHandle:
    return RemoteHandle(*handle) if isinstance(handle, tuple) else handle


def _as_store(handle: StoreHandle) -> RemoteHandle:
    return RemoteHandle(*handle) if isinstance(handle, tuple) else handle


def _grow(handle: RemoteHandle, steps: int, rows: int) -> None:
    if callable(handle.row_offset):
        return  # which rows it reaches is the program's knowledge
    entries = steps if handle.row_offset is None else steps * (handle.row_offset + rows)
    if handle.buffer.entries < entries:
        handle.buffer.entries = entries


def _check_arguments(
    graph: popxl.Graph,
    steps: int,
    rows: int,
    loaded: Iterable[Tensor],
    stored: Iterable[Tensor],
    seed: Tensor | None,
) -> None:
    if steps < 1 or rows < 1:
        raise ValueError(
            f"batch_serialise: got steps {steps} and rows {rows}; expected at least 1 of each."
        )
    for t in (*loaded, *([seed] if seed is not None else [])):
        if t not in graph or t not in graph.inputs:
            raise ValueError(
                f"batch_serialise: got %{t.name} to load or as seed; expected an input of "
                f"graph '{graph.name}'."
            )
    for t in stored:
        if t not in graph or not (t in graph.inputs or t in graph.outputs):
            raise ValueError(
                f"batch_serialise: got %{t.name} to store; expected an input or output of "
                f"graph '{graph.name}'."
            )
