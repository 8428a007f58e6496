"""Checks that a graph, or a whole Ir, is well formed: what transforms promise and the engine
trusts.
"""

from collections.abc import Sequence

from popxl.errors import GraphError
from popxl.graph import Graph, called_first
from popxl.ir import Ir
from popxl.opdef import Op, as_specs
from popxl.tensor import Tensor


def verify(what: Ir | Graph) -> None:
    """Check a graph, or every graph of an Ir.

    Every op's results have the specs that its operands imply; tensors belong to their graph, have
    unique names and are made before they are used; calls give each input of the called graph a
    tensor of its spec and return all outputs; by-reference inputs are inputs, and so is what a
    graph rounds from, by value; no graph calls itself.

    Raises:
        GraphError: the first violation, with the op, its graph and the line that made it.
    """
    graphs = list(what.graphs) if isinstance(what, Ir) else [what]
    wanted, order = set(graphs), called_first(*graphs)
    _verify_acyclic(order)
    # called graphs first: their faults show in their callers too
    for graph in (g for g in order if g in wanted):
        _verify_graph(graph)


def _verify_graph(graph: Graph) -> None:
    _verify_names(graph)
    _verify_inputs(graph)
    made = _given(graph)
    with graph:
        for op in graph.ops:
            _verify_operands(op, graph, made)
            _verify_results(op, graph)
            _verify_calls(op)
            made.update(op.outputs)
    for t in graph.outputs:
        if t not in made:
            raise GraphError(
                f"verify: got output %{t.name} of {_name(graph)}; expected a tensor that an op "
                "there makes, or an input."
            )


def _name(graph: Graph) -> str:
    return f"graph '{graph.name or 'main'}'"


def _fail(op: Op, got: str, expected: str) -> None:
    raise GraphError(
        f"verify: got {got} in {op!r} of {_name(op.graph)}, built at {op.where}; expected "
        f"{expected}."
    )


def _given(graph: Graph) -> set[Tensor]:
    """Tensors that exist before the first op."""
    shards = [v.shard for v in graph.variables if v.shard is not None]
    return {*graph.inputs, *graph.constants, *graph.variables, *shards, *graph.retained}


def _verify_names(graph: Graph) -> None:
    for name, t in graph._tensors.items():
        if t.name != name or t._graph is not graph:
            raise GraphError(
                f"verify: got tensor %{t.name} of {_name(t._graph)} under the name {name!r} in "
                f"{_name(graph)}; expected its own name there."
            )


def _verify_inputs(graph: Graph) -> None:
    for t in graph.inputs:
        if graph._tensors.get(t.name) is not t or t._op is not None or graph.inputs.count(t) > 1:
            raise GraphError(
                f"verify: got input %{t.name} of {_name(graph)}; expected a tensor of that graph "
                "that no op makes, once."
            )
    for t in graph._by_ref_inputs:
        if t not in graph.inputs:
            raise GraphError(
                f"verify: got by-reference tensor %{t.name} of {_name(graph)}; expected one "
                "of its inputs."
            )
    seed = graph.rounding_seed
    if seed is not None and (seed not in graph.inputs or seed in graph._by_ref_inputs):
        raise GraphError(
            f"verify: got %{seed.name} as the seed that {_name(graph)} rounds from; expected one "
            "of its inputs, by value."
        )


def _verify_operands(op: Op, graph: Graph, made: set[Tensor]) -> None:
    if op.graph is not graph:
        _fail(
            op, f"an op of {_name(op.graph)} in the list of {_name(graph)}", "it in its own graph"
        )
    for t in op.inputs:
        if t._graph is not graph:
            _fail(op, f"operand %{t.name} of {_name(t._graph)}", "a tensor of the op's graph")
        if t not in made:
            _fail(op, f"operand %{t.name}", "one that is made before it is used")


def _verify_results(op: Op, graph: Graph) -> None:
    try:
        specs = as_specs(op.definition.infer(**op.arguments))
    except Exception as error:
        raise GraphError(
            f"verify: got {op!r} of {_name(graph)}, built at {op.where}; expected operands that "
            f"the op accepts ({error})"
        ) from error
    if len(specs) != len(op.outputs):
        _fail(op, f"{len(op.outputs)} results", f"{len(specs)}, as inferred from its operands")
    for t, spec in zip(op.outputs, specs):
        if t._op is not op or graph._tensors.get(t.name) is not t:
            _fail(op, f"result %{t.name}", "a tensor of the op's graph that this op makes")
        if t.spec != spec:
            _fail(op, f"%{t.name}: {t.spec}", f"{spec}, as inferred from its operands")


def _verify_calls(op: Op) -> None:
    for graph, inputs in op.called():
        if op.graph.ir._graphs.get(graph.name) is not graph:
            _fail(op, f"a call of {_name(graph)} of another Ir", "a graph of the op's Ir")
        if len(inputs) != len(graph.inputs):
            _fail(op, f"{len(inputs)} inputs for {_name(graph)}", f"its {len(graph.inputs)}")
        for inner, outer in zip(graph.inputs, inputs):
            if (outer.shape, outer.dtype) != (inner.shape, inner.dtype):
                _fail(
                    op,
                    f"%{outer.name}: {outer.spec} for input %{inner.name} of {_name(graph)}",
                    str(inner.spec),
                )
        if op.definition.name == "call" and op not in graph._call_sites:
            _fail(
                op, f"a call that {_name(graph)} does not know", "it among that graph's call sites"
            )
        if op.definition.name != "call" and not graph._is_body:
            _fail(
                op,
                f"{_name(graph)}, which is not a body",
                "a body, to which autodiff adds no outputs",
            )
        if op.definition.name == "repeat":
            _verify_loop(op, graph)


def _verify_loop(op: Op, graph: Graph) -> None:
    if len(graph.outputs) > len(graph.inputs):
        _fail(
            op,
            f"{len(graph.outputs)} outputs of {_name(graph)}",
            f"at most its {len(graph.inputs)} inputs",
        )
    for result, first in zip(graph.outputs, graph.inputs):
        if (result.shape, result.dtype) != (first.shape, first.dtype):
            _fail(
                op,
                f"output %{result.name}: {result.spec}",
                f"{first.spec}, because it becomes input %{first.name}",
            )


def _verify_acyclic(order: Sequence[Graph]) -> None:
    """GraphError unless each graph comes after all that it calls."""
    known: set[Graph] = set()
    for graph in order:
        known.add(graph)
        for called in graph.called_graphs:
            if called not in known or called is graph:
                raise GraphError(
                    f"verify: got {_name(called)}, which calls itself; expected no cycle of calls."
                )
