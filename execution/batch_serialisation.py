"""A layer's graphs, run over all micro-batches of the global batch as its plan says."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import popxl
import popxl_addons as addons
from popxl import ReplicaGrouping, Tensor, TensorSpec
from popxl.transforms.autodiff import ExpectedConnectionType

from popxl_gpt.execution.layer_plan import (
    FromBuffer,
    FromStream,
    LayerPlan,
    Seed,
    ToBuffer,
    ToStream,
)
from popxl_gpt.execution.transfers import shard_spec

IoMode = Literal["compute", "io", "io_overlapped"]
Loads = dict[Tensor, popxl.HostToDeviceStream | addons.RemoteHandle]
Streams = dict[Tensor, popxl.DeviceToHostStream]
Stores = dict[Tensor, addons.RemoteHandle]


@dataclass(frozen=True, eq=False)
class LayerIO:
    """What the plans' names stand for: host streams, and buffers for activations between layers."""

    inputs: addons.InputStreams
    outputs: addons.OutputStreams
    buffers: dict[str, popxl.RemoteBuffer]
    shard_group: ReplicaGrouping | None
    """Replicas over which activations, identical on them, are cut; none: each keeps the whole."""
    steps: int
    """Runs of a layer in a phase."""
    io_mode: IoMode

    @classmethod
    def make(
        cls,
        inputs: addons.InputStreams,
        outputs: addons.OutputStreams,
        rows: Mapping[str, TensorSpec],
        steps: int,
        io_mode: IoMode,
        shard_group: ReplicaGrouping | None = None,
    ) -> "LayerIO":
        """A buffer of rows like these for each name; the transforms enlarge them to the rows that
        the plans reach.
        """
        buffers = {
            name: addons.create_remote_buffer(
                row if shard_group is None else shard_spec(row, shard_group), steps
            )
            for name, row in rows.items()
        }
        return cls(inputs, outputs, buffers, shard_group, steps, io_mode)

    def rows(self, place: FromBuffer | ToBuffer) -> addons.RemoteHandle:
        """The rows of a buffer that a plan's entry means."""
        return addons.RemoteHandle(self.buffers[place.name], place.row, self.shard_group)


@dataclass(eq=False)
class KeptRows:
    """The buffers of what layers keep of their forward pass: a row for each run of each layer.
    Layers of several kinds use the same buffers.
    """

    layers: range
    buffers: list[popxl.RemoteBuffer] = field(default_factory=list)

    def handles(self, tensors: Sequence[Tensor], steps: int) -> dict[Tensor, addons.RemoteHandle]:
        """The place of each tensor of one kind of layer, in the first buffer of its form that
        nothing else of it has taken; a new one where there is none.
        """
        free, found = list(self.buffers), {}
        for t in tensors:
            fitting = [b for b in free if (b.tensor_shape, b.tensor_dtype) == (t.shape, t.dtype)]
            if fitting:
                free.remove(fitting[0])
            else:
                fitting = [addons.create_remote_buffer(t.spec, len(self.layers) * steps)]
                self.buffers += fitting
            found[t] = addons.RemoteHandle(fitting[0], -self.layers.start)
        return found


def serialise(
    graph: addons.GraphWithNamedArgs, plan: LayerPlan, io: LayerIO
) -> addons.GraphWithNamedArgs:
    """The graph over all micro-batches, with inputs (n, [seed], named arguments) and no outputs."""
    loads, seed = _loads(graph.graph, plan, io)
    streams, buffers = _stores(graph.graph, plan, io)
    return addons.batch_serialise(
        graph,
        io.steps,
        load_handles=loads,
        store_streams=streams,
        store_buffers=buffers,
        seed_input=seed,
        rows=plan.layers,
        io_mode=io.io_mode,
    ).graph


def serialise_with_gradient(
    fwd: addons.GraphWithNamedArgs,
    grad: addons.GraphWithNamedArgs,
    plan: LayerPlan,
    io: LayerIO,
    kept: KeptRows | None = None,
) -> tuple[addons.GraphWithNamedArgs, addons.GraphWithNamedArgs]:
    """Forward and gradient graph over all micro-batches.

    What the gradient needs of the forward pass is loaded again where it came from a buffer, and
    kept otherwise.

    Args:
        kept: the buffers of what is kept, where other layers use them, too.
    """
    loads, seed = _loads(fwd.graph, plan, io)
    streams, buffers = _stores(fwd.graph, plan, io)
    others = [t for t in kept_activations(fwd, grad, loads) if t not in buffers]
    kept = kept or KeptRows(range(plan.layers))
    buffers.update(kept.handles(others, io.steps))
    provided = grad.graph.inputs[: len(plan.gradient_inputs)]
    loads.update({t: io.rows(place) for t, place in zip(provided, plan.gradient_inputs)})
    required = grad.graph.outputs[: len(plan.gradient_outputs)]
    buffers.update({t: io.rows(place) for t, place in zip(required, plan.gradient_outputs)})
    fwd_result, grad_result = addons.batch_serialise_fwd_and_grad(
        fwd,
        grad,
        fwd.args,
        io.steps,
        load_handles=loads,
        store_streams=streams,
        store_buffers=buffers,
        seed_input=seed,
        rows=kept.layers.stop,
        io_mode=io.io_mode,
    )
    return fwd_result.graph, grad_result.graph


def kept_activations(
    fwd: addons.GraphWithNamedArgs, grad: addons.GraphWithNamedArgs, loaded: Container[Tensor]
) -> list[Tensor]:
    """What a gradient takes of the forward pass, beside variables and what is loaded again."""
    own = set(fwd.args.values_flat())
    return [
        connection.fwd_tensor
        for connection in grad.grad_graph_info.expected_inputs
        if connection.connection_type is ExpectedConnectionType.Fwd
        and connection.fwd_tensor not in own
        and connection.fwd_tensor not in loaded
    ]


def _loads(graph: popxl.Graph, plan: LayerPlan, io: LayerIO) -> tuple[Loads, Tensor | None]:
    """The places that the inputs come from, and the input that is the seed."""
    loads: Loads = {}
    seed = None
    for t, place in zip(graph.inputs, plan.inputs):
        if isinstance(place, Seed):
            seed = t
        else:
            loads[t] = io.inputs[place.name] if isinstance(place, FromStream) else io.rows(place)
    return loads, seed


def _stores(graph: popxl.Graph, plan: LayerPlan, io: LayerIO) -> tuple[Streams, Stores]:
    """The places that the outputs go to: the host, or buffers."""
    places = dict(zip(graph.outputs, plan.outputs))
    streams = {
        t: io.outputs[place.name] for t, place in places.items() if isinstance(place, ToStream)
    }
    return streams, {
        t: io.rows(place) for t, place in places.items() if isinstance(place, ToBuffer)
    }
