"""Recompute forward values instead of keeping them."""

import math
from collections.abc import Collection, Iterable
from functools import cached_property

import popxl
from popxl import Tensor, ops
from popxl.collection import without_collection
from popxl.errors import GraphError
from popxl.op_records import Op, op_cost
from popxl.transforms.autodiff import (
    ExpectedConnection,
    ExpectedConnectionType,
    GradGraphInfo,
    add_activation,
    is_view,
)
from popxl.transforms.clone import clone_constant, clone_op
from popxl.transforms.storage import Summaries

from popxl_addons.graph import GraphWithNamedArgs, changed_results, input_like
from popxl_addons.performance_utils import TOTAL, evaluate_FLOPs
from popxl_addons.utils import suffix_graph_name


class Recomputation:
    """What a gradient graph takes of its forward graph, and what making it again costs."""

    def __init__(self, grad_graph: GraphWithNamedArgs) -> None:
        info = grad_graph.grad_graph_info
        self.forward = info.forward_graph
        self.taken = [
            c.fwd_tensor
            for c in info.expected_inputs
            if c.connection_type is ExpectedConnectionType.Fwd
        ]
        """Forward values that the gradient takes, inputs among them."""

    @property
    def values(self) -> list[Tensor]:
        """What may be kept: all that is made on the way to what the gradient takes, but what only
        rearranges. Results of called graphs are left out, whose gradients run them again anyway.
        """
        made = (op for op in self.ops(()) if not is_view(op) and not op.called())
        return [t for op in made for t in op.outputs]

    def ops(self, kept: Iterable[Tensor]) -> list[Op]:
        """The ops that make what the gradient takes of the forward inputs and what is kept, in
        order.
        """
        known = {*self.forward.inputs, *kept}
        needed, found = set(self.taken) - known, []
        for op in reversed(self.forward.ops):
            if not needed.isdisjoint(op.outputs):
                needed.update(t for t in op.inputs if t not in known)
                found.append(op)
        return found[::-1]

    def flops(self, kept: Iterable[Tensor]) -> int:
        """Operations of those ops."""
        return sum(self._flops[op] for op in self.ops(kept))

    def prices(self, values: Iterable[Tensor]) -> dict[Tensor, float]:
        """Operations that making each value again costs for a byte of it, in the order in which
        they are dropped, if first all of them are kept: always the cheapest one, the last one of
        several.

        Each is above those before it, if by next to nothing: keeping what is above a price is
        keeping what is dropped after the value that has it.
        """
        kept, highest, found = list(values), 0.0, dict[Tensor, float]()
        while kept:
            now = self.flops(kept)
            each = {t: (self.flops(set(kept) - {t}) - now) / t.spec.nbytes for t in reversed(kept)}
            cheapest = min(each, key=each.__getitem__)
            highest = max(math.nextafter(highest, math.inf), each[cheapest])
            found[cheapest] = highest
            kept.remove(cheapest)
        return found

    @cached_property
    def _flops(self) -> dict[Op, int]:
        return {op: _op_flops(op) for op in self.forward.ops}


def _op_flops(op: Op) -> int:
    """Operations of an op; of a call, a loop or a branch, those of the dearest graph."""
    bodies = [evaluate_FLOPs(body)[TOTAL] for body, _ in op.called()]
    if not bodies:
        return op_cost(op).flops
    times: int = op.arguments.get("repeat_count", 1)
    return times * max(flops for flops in bodies if isinstance(flops, int))


def recompute_graph(grad_graph: GraphWithNamedArgs) -> GraphWithNamedArgs:
    """A gradient graph that first runs the forward graph: `recompute_rest` with nothing kept."""
    return recompute_rest(grad_graph, ())


@without_collection()
def recompute_rest(grad_graph: GraphWithNamedArgs, keep: Collection[Tensor]) -> GraphWithNamedArgs:
    """A gradient graph that first runs the forward graph, or what makes all that is not kept of it,
    and takes from it what the given one takes from its caller.

    Requires: ``grad_graph`` has a GradGraphInfo.
    Ensures: besides the provided gradients it needs forward *inputs* and what is kept only; its
    outputs, named arguments and by-reference inputs are those of ``grad_graph``. Inputs: the
    provided gradients; forward inputs that the gradient needed; the other forward inputs that are
    needed, by name; what is kept; then the rest, the accumulators for one. Seeds are forward
    inputs, so dropout repeats exactly. The forward graph is given what is kept as outputs.

    Args:
        keep: values of the forward graph.
    Raises:
        GraphError: the forward graph writes in place to an input that it gives back, or anywhere
            where something is kept.
    """
    info = grad_graph.grad_graph_info
    forward, gradient = info.forward_graph, info.graph
    write = Summaries().first_write(forward)
    if write is not None and (keep or changed_results(forward)):
        raise GraphError(
            f"recompute_rest: got {write!r} in graph '{forward.name}', built at {write.where}; "
            "expected no op that writes in place, because the graph runs again on what it was "
            "given. Use the out-of-place form."
        )
    expected = list(zip(gradient.inputs, info.expected_inputs))
    provided = [(t, c) for t, c in expected if c.connection_type is ExpectedConnectionType.FwdGrad]
    activations = [
        (t, c.fwd_tensor) for t, c in expected if c.connection_type is ExpectedConnectionType.Fwd
    ]
    again, parts = (
        _rest(Recomputation(grad_graph), keep)
        if keep
        else (forward, {t: t for t in (*forward.inputs, *forward.outputs)})
    )
    own = set(forward.inputs)
    needed = [source for _, source in activations if source in own]
    others = sorted(own.intersection(parts).difference(needed), key=lambda t: t.name)

    result = gradient.ir.create_empty_graph(suffix_graph_name(gradient.name, "recompute"))
    with result:
        connections: dict[Tensor, Tensor] = {t: input_like(gradient, t) for t, _ in provided}
        inputs = {t: input_like(forward, t) for t in dict.fromkeys((*needed, *others, *keep))}
        connections.update((t, input_like(gradient, t)) for t in gradient.inputs[len(expected) :])
        own_inputs = set(again.inputs)
        call = ops.call_with_info(
            again,
            inputs_dict={parts[t]: v for t, v in inputs.items() if parts.get(t) in own_inputs},
        )
        for t, source in activations:
            known = source in inputs
            connections[t] = inputs[source] if known else call.graph_to_parent(parts[source])
        for t in ops.call(gradient, inputs_dict=connections):
            popxl.graph_output(t)
    new_info = GradGraphInfo.make(
        result,
        forward,
        [*(c for _, c in provided), *(ExpectedConnection.of_value(t) for t in inputs)],
        info.expected_outputs,
    )
    return GraphWithNamedArgs.from_grad_graph(new_info, grad_graph.args.remap(connections))


def _rest(
    recomputation: Recomputation, kept: Collection[Tensor]
) -> tuple[popxl.Graph, dict[Tensor, Tensor]]:
    """A graph from forward inputs and what is kept to what else the gradient takes, and its tensor
    for each of the forward graph's. The forward graph is given what is kept as outputs.
    """
    forward, made = recomputation.forward, recomputation.ops(kept)
    for t in kept:
        if t not in forward.outputs:
            add_activation(forward, t, "a value that can be kept, as it is made outside of one")
    read = {t for op in made for t in op.inputs}
    graph = forward.ir.create_empty_graph(suffix_graph_name(forward.name, "rest"))
    with graph:
        values = {t: input_like(forward, t) for t in (*forward.inputs, *kept) if t in read}
        values.update((t, clone_constant(t)) for t in forward.constants if t in read)
        for op in made:
            clone = clone_op(op, values.__getitem__)
            for t, result in zip(op.outputs, clone.outputs):
                values.setdefault(t, result)
        known = {*forward.inputs, *kept}
        for t in recomputation.taken:
            if t not in known:
                popxl.graph_output(values[t])
    return graph, values
