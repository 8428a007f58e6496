"""A layer's graphs, run over all micro-batches of the global batch as its plan says."""

from dataclasses import dataclass
from typing import Dict, Optional, Tuple, Union

import popxl
import popxl_addons as addons
from popxl import ReplicaGrouping, Tensor, TensorSpec

from execution.layer_plan import FromStream, LayerPlan, Seed, ToStream


@dataclass(frozen=True, eq=False)
class Connections:
    """What the plans' names stand for: host streams, and buffers for activations between layers."""

    inputs: addons.InputStreams
    outputs: addons.OutputStreams
    buffers: Dict[str, popxl.RemoteBuffer]
    shard_group: Optional[ReplicaGrouping]
    """Replicas over which activations, identical on them, are cut; none: each keeps the whole."""
    steps: int
    """Micro-batches per replica in a global batch."""
    io_mode: str

    @classmethod
    def make(
        cls,
        inputs: addons.InputStreams,
        outputs: addons.OutputStreams,
        activation: TensorSpec,
        names: Tuple[str, ...],
        steps: int,
        io_mode: str,
        shard_group: Optional[ReplicaGrouping] = None,
    ) -> "Connections":
        """Connections with one buffer per name; the transforms enlarge them to the rows that the plans reach."""
        shards = 1 if shard_group is None else shard_group.group_size
        elements = activation.shape[0] * activation.shape[1]
        if elements % shards:
            shards, shard_group = 1, None
        buffers = {name: addons.create_remote_buffer(activation, steps, shard_over=shards) for name in names}
        return cls(inputs, outputs, buffers, shard_group, steps, io_mode)

    def handle(self, place: object) -> Union[popxl.HostToDeviceStream, popxl.DeviceToHostStream, addons.RemoteHandle]:
        """The stream or the rows of a buffer that a plan's entry means."""
        if isinstance(place, FromStream):
            return self.inputs[place.name]
        if isinstance(place, ToStream):
            return self.outputs[place.name]
        return addons.RemoteHandle(self.buffers[place.name], place.row, self.shard_group)  # type: ignore[attr-defined]


def serialise(graph: addons.GraphWithNamedArgs, plan: LayerPlan, connections: Connections) -> addons.GraphWithNamedArgs:
    """The graph over all micro-batches, with inputs (n, [seed], named arguments) and no outputs."""
    loads, seed = _loads(graph.graph, plan, connections)
    streams, buffers = _stores(graph.graph, plan, connections)
    return addons.batch_serialise(
        graph,
        connections.steps,
        load_handles=loads,
        store_streams=streams,
        store_buffers=buffers,
        seed_input=seed,
        rows=plan.layers,
        io_mode=connections.io_mode,
    ).graph


def serialise_with_gradient(
    fwd: addons.GraphWithNamedArgs, grad: addons.GraphWithNamedArgs, plan: LayerPlan, connections: Connections
) -> Tuple[addons.GraphWithNamedArgs, addons.GraphWithNamedArgs]:
    """Forward and gradient graph over all micro-batches.

    What the gradient needs of the forward pass is loaded again where it came from a buffer, and kept otherwise.
    """
    loads, seed = _loads(fwd.graph, plan, connections)
    streams, buffers = _stores(fwd.graph, plan, connections)
    provided = grad.graph.inputs[: len(plan.gradient_inputs)]
    loads.update({t: connections.handle(place) for t, place in zip(provided, plan.gradient_inputs)})
    required = grad.graph.outputs[: len(plan.gradient_outputs)]
    buffers.update({t: connections.handle(place) for t, place in zip(required, plan.gradient_outputs)})
    fwd_result, grad_result = addons.batch_serialise_fwd_and_grad(
        fwd,
        grad,
        fwd.args,
        connections.steps,
        load_handles=loads,
        store_streams=streams,
        store_buffers=buffers,
        seed_input=seed,
        rows=plan.layers,
        io_mode=connections.io_mode,
    )
    return fwd_result.graph, grad_result.graph


def _loads(
    graph: popxl.Graph, plan: LayerPlan, connections: Connections
) -> Tuple[Dict[Tensor, object], Optional[Tensor]]:
    places = dict(zip(graph.inputs, plan.inputs))
    seeds = [t for t, place in places.items() if isinstance(place, Seed)]
    loads = {t: connections.handle(place) for t, place in places.items() if t not in seeds}
    return loads, (seeds[0] if seeds else None)


def _stores(
    graph: popxl.Graph, plan: LayerPlan, connections: Connections
) -> Tuple[Dict[Tensor, object], Dict[Tensor, object]]:
    places = dict(zip(graph.outputs, plan.outputs))
    streams = {t: connections.handle(place) for t, place in places.items() if isinstance(place, ToStream)}
    return streams, {t: connections.handle(place) for t, place in places.items() if t not in streams}
