"""Gradient graphs of graphs with named variables, with or without accumulators inside."""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
import popxl
from popxl import Tensor, ops
from popxl.extensions import round_from
from popxl.sharing import sharing_of
from popxl.tensor import Constant
from popxl.transforms.autodiff import ExpectedConnection, GradGraphInfo
from popxl.transforms.clone import clone_constant, clone_op
from popxl.transforms.storage import Summaries

from popxl_addons.dot_tree import sanitise
from popxl_addons.graph import CalledGraphsGradInfo, GraphWithNamedArgs, input_like
from popxl_addons.named_replica_grouping import NamedReplicaGrouping
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.rts import shards_of
from popxl_addons.utils import suffix_graph_name
from popxl_addons.variable_factory import NamedVariableFactories, VariableFactory

COUNTER = "mean_accum_counter"


def autodiff(
    graph: GraphWithNamedArgs | popxl.Graph,
    grads_provided: Iterable[Tensor] | None = None,
    grads_required: Iterable[Tensor] | None = None,
    called_graphs_grad_info: Mapping[Any, Any] | None = None,
) -> GraphWithNamedArgs:
    """Appends what the gradient needs to the graph's outputs, and returns the gradient graph.

    As `popxl.transforms.autodiff`, but from and to graphs with named variables. A module's own
    build_grad is preferred.
    """
    if not isinstance(graph, GraphWithNamedArgs):
        graph = GraphWithNamedArgs(graph)
    return graph.autodiff(grads_provided, grads_required, called_graphs_grad_info, force=True)


def autodiff_with_accumulation(
    graph: GraphWithNamedArgs,
    tensors_to_accumulate_grads: Iterable[Tensor],
    grads_provided: Iterable[Tensor] | None = None,
    grads_required: Iterable[Tensor] | None = None,
    called_graphs_grad_info: CalledGraphsGradInfo | None = None,
    replica_groupings: NamedReplicaGrouping | None = None,
    accumulator_dtype: popxl.dtype | None = None,
) -> tuple[NamedVariableFactories, GraphWithNamedArgs]:
    """Appends what the gradient needs to the graph's outputs; the gradient graph keeps running
    means of gradients.

    Ensures: for each accumulated tensor the gradient graph has, instead of an output, a
    by-reference input ``accum.<its name>``, and one more, the float32 scalar
    ``mean_accum_counter``. Every call does ``accum = accum*c/(c+1) + gradient/(c+1)`` with c the
    counter, and then adds one to the counter. So after k calls from zero each holds the mean of k
    gradients, and setting the counter to zero starts a new mean.

    Args:
        tensors_to_accumulate_grads: inputs of the graph, its variables in most cases.
        grads_required: tensors whose gradients come out, in this order.
        replica_groupings: of the accumulators, by variable name; default: the variable's own, and
            all replicas for inputs that are no variables of a module.
        accumulator_dtype: element type of the accumulators; default: each tensor's own, as in
        PopXL. float32 keeps small
            gradients that a 16-bit mean would lose.
    Returns:
        (factories of the accumulators and the counter, starting at zero; the gradient graph with
        the same names).
    """
    accumulated, required = tuple(tensors_to_accumulate_grads), tuple(grads_required or ())
    wanted = tuple(dict.fromkeys((*required, *accumulated)))
    info = autodiff(graph, grads_provided, wanted, called_graphs_grad_info).grad_graph_info
    gradients = dict(zip(info.outputs, info.graph.outputs))
    names = {t: name for name, t in graph.args.to_dict().items()}

    result = info.graph.ir.create_empty_graph(suffix_graph_name(info.graph.name, "accumulate"))
    args, factories = NamedTensors(), NamedVariableFactories()
    own = set[int](), set[int]()
    with result:
        values = {t: input_like(info.graph, t) for t in info.graph.inputs}
        if (seed := info.graph.rounding_seed) is not None:
            round_from(result, values[seed])
        accumulators: dict[Tensor, list[Tensor]] = {}
        for t in accumulated:
            name = names.get(t, sanitise(t.name))
            group = (
                replica_groupings.get(name)
                if replica_groupings is not None and name in replica_groupings
                else sharing_of(t).grouping
            )
            factory = _zeros_like(t, f"accum.{name}", accumulator_dtype, group)
            factories._put(f"accum.{name}", factory, own=own[0])
            args._put(f"accum.{name}", factory.create_input(), own=own[1])
            accumulators.setdefault(gradients[t], []).append(args[f"accum.{name}"])
        factories.insert(
            COUNTER,
            VariableFactory(lambda: np.zeros((), np.float32), popxl.float32, COUNTER, by_ref=True),
        )
        args.insert(COUNTER, factories[COUNTER].create_input())
        with popxl.in_sequence():  # every mean reads the counter before it counts
            _emit_accumulating(info.graph, values, accumulators, args[COUNTER])
        for t in required:
            popxl.graph_output(values[gradients[t]])
    connections = [ExpectedConnection.of_gradient(t) for t in required]
    new_info = GradGraphInfo.make(result, info.forward_graph, info.expected_inputs, connections)
    return factories, GraphWithNamedArgs.from_grad_graph(new_info, args)


def _emit_accumulating(
    graph: popxl.Graph,
    values: dict[Tensor, Tensor],
    accumulators: dict[Tensor, list[Tensor]],
    counter: Tensor,
) -> None:
    """Emit the graph's ops in the current graph, each gradient going into its accumulators as soon
    as it is there, or at the end where ops write to it in place.
    """
    summaries = Summaries()
    written = summaries.modified_storage(graph)

    def value(t: Tensor) -> Tensor:
        if t not in values:
            values[t] = clone_constant(cast(Constant, t))
        return values[t]

    def accumulate(t: Tensor) -> None:
        for accumulator in accumulators.get(t, ()):
            ops.var_updates.accumulate_mean_(accumulator, value(t), counter)

    done: set[Tensor] = set()
    for op in graph.ops:
        values.update(zip(op.outputs, clone_op(op, value).outputs))
        for t in op.outputs:
            if summaries.roots(t).isdisjoint(written):
                accumulate(t)
                done.add(t)
    for t in dict.fromkeys(graph.outputs):
        value(t)
        if t not in done:
            accumulate(t)
    ops.add_(counter, popxl.constant(1, popxl.float32))


def _zeros_like(
    t: Tensor, name: str, dtype: popxl.dtype | None, group: popxl.ReplicaGrouping | None
) -> VariableFactory:
    dtype = dtype or t.dtype
    shape = t.meta_shape or t.shape
    zeros = np.broadcast_to(np.zeros((), dtype.as_numpy()), shape)
    return VariableFactory(lambda: zeros, dtype, name, True, group, shards_of(t, group))


def remap_grad_info(
    grad_info: GradGraphInfo, forward_graph: popxl.Graph, backward_graph: popxl.Graph
) -> GradGraphInfo:
    """The same connections for transformed graphs whose inputs and outputs have the order of the
    original ones.
    """
    old = grad_info.forward_graph
    new = dict(zip((*old.inputs, *old.outputs), (*forward_graph.inputs, *forward_graph.outputs)))

    def remap(connections: Iterable[ExpectedConnection]) -> list[ExpectedConnection]:
        return [ExpectedConnection.make(c.connection_type, new[c.fwd_tensor]) for c in connections]

    inputs, outputs = remap(grad_info.expected_inputs), remap(grad_info.expected_outputs)
    return GradGraphInfo.make(backward_graph, forward_graph, inputs, outputs)
