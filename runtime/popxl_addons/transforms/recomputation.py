"""Recompute forward values instead of keeping them."""

import popxl
from popxl import Tensor, ops
from popxl.collection import without_collection
from popxl.transforms.autodiff import ExpectedConnection, ExpectedConnectionType, GradGraphInfo

from popxl_addons.graph import GraphWithNamedArgs, input_like
from popxl_addons.utils import suffix_graph_name


@without_collection()
def recompute_graph(grad_graph: GraphWithNamedArgs) -> GraphWithNamedArgs:
    """A gradient graph that first runs the forward graph, and takes from it what the given one
    takes from its caller.

    Requires: ``grad_graph`` has a GradGraphInfo.
    Ensures: besides the provided gradients it needs forward *inputs* only; its outputs, named
    arguments and by-reference inputs are those of ``grad_graph``. Inputs: the provided gradients;
    forward inputs that the gradient needed; the other forward inputs, by name; then the rest, the
    accumulators for one. Seeds are forward inputs, so dropout repeats exactly.
    """
    info = grad_graph.grad_graph_info
    forward, gradient = info.forward_graph, info.graph
    expected = list(zip(gradient.inputs, info.expected_inputs))
    provided = [(t, c) for t, c in expected if c.connection_type is ExpectedConnectionType.FwdGrad]
    activations = [
        (t, c.fwd_tensor) for t, c in expected if c.connection_type is ExpectedConnectionType.Fwd
    ]
    own = set(forward.inputs)
    needed = [source for _, source in activations if source in own]
    others = sorted(own.difference(needed), key=lambda t: t.name)

    result = gradient.ir.create_empty_graph(suffix_graph_name(gradient.name, "recompute"))
    with result:
        connections: dict[Tensor, Tensor] = {t: input_like(gradient, t) for t, _ in provided}
        inputs = {t: input_like(forward, t) for t in (*needed, *others)}
        connections.update((t, input_like(gradient, t)) for t in gradient.inputs[len(expected) :])
        forward_call = ops.call_with_info(forward, inputs_dict=inputs)
        for t, source in activations:
            connections[t] = forward_call.graph_to_parent(source)
        for t in ops.call(gradient, inputs_dict=connections):
            popxl.graph_output(t)
    new_info = GradGraphInfo.make(
        result,
        forward,
        [*(c for _, c in provided), *(ExpectedConnection.of_value(t) for t in inputs)],
        info.expected_outputs,
    )
    return GraphWithNamedArgs.from_grad_graph(new_info, grad_graph.args.remap(connections))
