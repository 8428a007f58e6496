"""Gradients of the ops that call graphs: a call of the gradient graph, a conditional of two, a
repeat backwards.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce

import numpy as np

from popxl import dtypes, ops
from popxl.context import get_current_graph
from popxl.errors import GraphError
from popxl.graph import Graph
from popxl.opdef import Op
from popxl.ops.call import CallSiteInfo
from popxl.tensor import Tensor, constant, graph_input, graph_output
from popxl.transforms.grad_info import ExpectedConnectionType, GradGraphInfo
from popxl.transforms.gradient_rules import GradientContext, GradientPairs, added


def total(context: GradientContext, t: Tensor, gradients: Iterable[Tensor | None]) -> Tensor:
    """The sum of gradients of ``t``, zeros if there are none."""
    present = [g for g in gradients if g is not None]
    return reduce(added, present) if present else context.zeros(t)


def connect(
    context: GradientContext,
    info: GradGraphInfo,
    value: Callable[[Tensor], Tensor],
    gradient: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """Inputs for a gradient graph, from its forward tensors' values and whole gradients where it is
    called.
    """
    inputs: list[Tensor] = []
    for i, connection in enumerate(info.expected_inputs):
        t = connection.fwd_tensor
        if connection.connection_type is ExpectedConnectionType.Fwd:
            inputs.append(value(t))
        else:  # a graph that adds several gradients of one tensor gets the whole as the first
            inputs.append(
                context.zeros(t) if connection in info.expected_inputs[:i] else gradient(t)
            )
    return inputs


def output_gradients(
    context: GradientContext, graph: Graph, outputs: Sequence[Tensor]
) -> Callable[[Tensor], Tensor]:
    """The map from an output of a called graph to its gradient at the call with these results. It
    may be returned twice.
    """
    return lambda t: total(
        context,
        t,
        (context.gradient(outer) for inner, outer in zip(graph.outputs, outputs) if inner is t),
    )


def new_graph(name: str) -> Graph:
    """An empty graph named after the gradient graph that will call it."""
    base = get_current_graph().name.rpartition("_subgraph(")[0]
    with get_current_graph().main_graph as main:
        return main.ir.create_empty_graph(f"{base}_{name}")


def input_like(t: Tensor) -> Tensor:
    """A new input of the current graph with a tensor's name and spec."""
    return graph_input(t.shape, t.dtype, t.name, meta_shape=t.meta_shape)


def call_gradients(context: GradientContext, op: Op) -> GradientPairs:
    """Call the gradient graph on the gradients and values of this call."""
    graph: Graph = op.arguments["graph"]
    info = context.called_info(graph)
    site = CallSiteInfo(op)
    inputs = connect(
        context,
        info,
        lambda t: context.value(site.graph_to_parent(t)),
        output_gradients(context, graph, op.outputs),
    )
    gradients = dict(zip(info.outputs, ops.call(info.graph, *inputs)))
    for inner, outer in zip(graph.inputs, op.inputs):
        if inner in gradients:
            yield outer, gradients[inner]
        else:
            context.block([outer], context.why_missing(inner))


def conditional_gradients(context: GradientContext, op: Op) -> GradientPairs:
    """A conditional of the branches' gradients. Each branch gives zeros for operands that only the
    other one uses.
    """
    sides = [(graph, inputs, context.called_info(graph)) for graph, inputs in op.called()]
    wanted: dict[Tensor, bool] = {}
    for graph, inputs, info in sides:
        for inner, outer in zip(graph.inputs, inputs):
            if outer not in context.active:
                continue
            wanted[outer] = inner in info.outputs and wanted.get(outer, True)
            if inner not in info.outputs:
                context.block([outer], context.why_missing(inner))
    operands = [t for t, can in wanted.items() if can]
    if not operands:
        return
    then_graph, else_graph = (
        _branch_gradients(context, g, inputs, info, operands) for g, inputs, info in sides
    )
    then_inputs, else_inputs = (
        _branch_inputs(context, op, g, inputs, info) for g, inputs, info in sides
    )
    condition = context.value(op.arguments["cond"])
    yield from zip(
        operands, ops.conditional(condition, then_graph, else_graph, then_inputs, else_inputs)
    )


def _branch_inputs(
    context: GradientContext, op: Op, graph: Graph, inputs: Sequence[Tensor], info: GradGraphInfo
) -> list[Tensor]:
    values = dict(zip(graph.inputs, inputs))
    return connect(
        context,
        info,
        lambda t: context.value(values[t]),
        output_gradients(context, graph, op.outputs),
    )


def _branch_gradients(
    context: GradientContext,
    graph: Graph,
    inputs: Sequence[Tensor],
    info: GradGraphInfo,
    operands: Sequence[Tensor],
) -> Graph:
    """A graph with the gradient graph's inputs that returns one gradient for each of the
    conditional's operands.
    """
    branch = new_graph("branch")
    with branch:
        gradients = dict(
            zip(info.outputs, ops.call(info.graph, *[input_like(t) for t in info.graph.inputs]))
        )
        for operand in operands:
            fed = [inner for inner, outer in zip(graph.inputs, inputs) if outer is operand]
            graph_output(total(context, operand, [gradients[inner] for inner in fed]))
    return branch


def repeat_gradients(context: GradientContext, op: Op) -> GradientPairs:
    """Run the loop again, keeping its carried inputs per iteration; then run the body's gradient
    backwards over them.

    Beyond PopXL, whose loops have no gradient.
    """
    body: Graph = op.arguments["graph"]
    inputs, count, carried = op.inputs, op.arguments["repeat_count"], len(op.outputs)
    if count == 0:
        yield from ((t, context.gradient(y)) for t, y in zip(inputs, op.outputs))
        return
    if context.has_transfers(body):
        raise GraphError(
            f"autodiff: got {op!r}, built at {op.where}, whose body loads or stores; expected a "
            "body that can run again, because the gradient of a loop recomputes it. Load before "
            "the loop and pass the values in."
        )
    for t in op.inputs:
        if not t.dtype.is_floating_point:
            context.block(
                [t],
                f"expected a floating-point tensor as input of {op!r}: loops give integers no "
                "gradient.",
            )
    info = context.called_info(body)
    moving = [i for i in range(carried) if body.inputs[i].dtype.is_floating_point]
    floats = context.active.intersection(t for t in inputs if t.dtype.is_floating_point)
    fixed = [i for i in range(carried, len(inputs)) if inputs[i] in floats]
    lacking = [body.inputs[i] for i in (*moving, *fixed) if body.inputs[i] not in info.outputs]
    if lacking:
        context.block(inputs, context.why_missing(lacking[0]))
        return
    used = {
        c.fwd_tensor
        for c in info.expected_inputs
        if c.connection_type is ExpectedConnectionType.Fwd
    }
    stashed = [i for i in range(carried) if body.inputs[i] in used]
    stash = _stash_loop(body, count, stashed, [context.value(t) for t in inputs]) if stashed else []
    backwards, constants = _backward_body(context, op, info, moving, fixed, stashed)
    results = ops.repeat(
        backwards,
        count,
        *[context.gradient_or_zeros(op.outputs[i]) for i in moving],
        *[context.zeros(inputs[i]) for i in fixed],
        constant(np.array([count]), dtypes.uint32, "iteration"),
        *stash,
        *[context.value(inputs[i]) for i in constants],
    )
    yield from zip((inputs[i] for i in (*moving, *fixed)), results)


def _stash_loop(
    body: Graph, count: int, stashed: Sequence[int], inputs: Sequence[Tensor]
) -> list[Tensor]:
    """Run the loop, writing these inputs of every iteration to buffers [count, ...]. Returns the
    buffers.
    """
    carried = len(body.outputs)
    graph = new_graph("stash")
    with graph:
        values = [input_like(t) for t in body.inputs[:carried]]
        buffers = [input_like_stacked(body.inputs[i], count) for i in stashed]
        iteration = graph_input((1,), dtypes.uint32, "iteration")
        values += [input_like(t) for t in body.inputs[carried:]]
        for result in ops.call(body, *values):
            graph_output(result)
        for i, buffer in zip(stashed, buffers):
            row = ops.reshape(values[i], (1, *values[i].shape))
            graph_output(ops.dynamic_update(buffer, iteration, row, [0], [1], True))
        graph_output(ops.add(iteration, constant(np.array([1]), dtypes.uint32)))
    empty = [
        ops.init(
            (count, *body.inputs[i].shape), body.inputs[i].dtype, f"stash_{body.inputs[i].name}"
        )
        for i in stashed
    ]
    first = constant(np.array([0]), dtypes.uint32, "iteration")
    results = ops.repeat(graph, count, *inputs[:carried], *empty, first, *inputs[carried:])
    return list(results[carried : carried + len(stashed)])


def input_like_stacked(t: Tensor, count: int) -> Tensor:
    """A new input of the current graph for ``count`` values of a tensor, stacked in front."""
    return graph_input((count, *t.shape), t.dtype, f"stash_{t.name}")


def _backward_body(
    context: GradientContext,
    op: Op,
    info: GradGraphInfo,
    moving: Sequence[int],
    fixed: Sequence[int],
    stashed: Sequence[int],
) -> tuple[Graph, list[int]]:
    """One iteration backwards, and which of the loop's inputs it takes as they are.

    Inputs: gradients of the moving carried values, sums for the fixed ones, iteration + 1 [1];
    buffers, constants. The first three, with new values, are its outputs.
    """
    body, count = op.arguments["graph"], op.arguments["repeat_count"]
    values: dict[Tensor, Tensor] = {}
    graph = new_graph("backwards")
    with graph:
        gradients = [input_like(op.outputs[i]) for i in moving]
        sums = [input_like(op.inputs[i]) for i in fixed]
        iteration = ops.sub(
            graph_input((1,), dtypes.uint32, "iteration"), constant(np.array([1]), dtypes.uint32)
        )
        for i in stashed:
            row = ops.dynamic_slice(
                input_like_stacked(body.inputs[i], count), iteration, [0], [1], True
            )
            values[body.inputs[i]] = ops.reshape(row, body.inputs[i].shape)
        constants = [
            i for i, t in enumerate(body.inputs) if i >= len(body.outputs) and t in info.inputs
        ]
        values.update((body.inputs[i], input_like(body.inputs[i])) for i in constants)
        by_position = dict(zip(moving, gradients))
        inputs = connect(
            context,
            info,
            values.__getitem__,
            lambda t: total(
                context,
                t,
                (by_position.get(j) for j, inner in enumerate(body.outputs) if inner is t),
            ),
        )
        results = dict(zip(info.outputs, ops.call(info.graph, *inputs)))
        for i in moving:
            graph_output(results[body.inputs[i]])
        for i, so_far in zip(fixed, sums):
            graph_output(ops.add(so_far, results[body.inputs[i]]))
        graph_output(iteration)
    return graph, constants


CONTROL_RULES = {
    "call": call_gradients,
    "repeat": repeat_gradients,
    "conditional": conditional_gradients,
}
"""Gradient rules of these ops, by name."""
