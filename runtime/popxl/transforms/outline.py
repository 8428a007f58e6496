"""Moving ops of a graph into a graph of their own."""

from collections.abc import Iterable

from popxl.errors import GraphError
from popxl.graph import Graph
from popxl.opdef import Op, map_tensors
from popxl.tensor import Constant, Tensor, graph_input
from popxl.transforms.clone import clone_constant, clone_op
from popxl.transforms.storage import aliased


def outline(graph: Graph, ops: Iterable[Op], name: str) -> tuple[Graph, dict[Tensor, Tensor]]:
    """Changes the graph: moves ops, in the order given, and their results into a new graph without
    outputs.

    What they use from outside becomes a by-reference input; constants, and views of outside
    tensors, are made anew. Nothing calls the new graph yet. The moved tensors belong to it from
    then on, so that using one in ``graph`` is refused as that of any other graph's.

    Returns:
        (the new graph, {its input: the tensor of ``graph`` that it stands for}).
    Raises:
        GraphError: ``graph`` still needs a moved result, or an op would run before one that makes
            its operand.
    """
    moved = list(ops)
    _check(graph, moved)
    with graph.main_graph:
        target = graph.ir.create_empty_graph(name)
    results = {t for op in moved for t in op.outputs}
    values: dict[Tensor, Tensor] = {}
    with target:
        for op in moved:
            for t in op.inputs:
                if t not in results:
                    _stand_in(t, values)
    gone = set(moved)
    graph._ops = [op for op in graph._ops if op not in gone]
    for op in moved:
        for argument, value in op.arguments.items():
            op.set_argument(argument, map_tensors(value, lambda t: values.get(t, t)))
        op.graph = target
        target._ops.append(op)
        for t in op.outputs:
            _move(t, target)
    return target, {values[t]: t for t in values if values[t] in target.inputs and not aliased(t)}


def _check(graph: Graph, moved: list[Op]) -> None:
    graph._check_open("outline")
    made_by = {t: op for op in moved for t in op.outputs}
    staying = [(t, repr(op)) for op in set(graph.ops) - set(moved) for t in op.inputs]
    for t, user in (*staying, *((t, "the outputs") for t in graph.outputs)):
        if t in made_by:
            raise GraphError(
                f"outline: got %{t.name}, which {user} of graph '{graph.name or 'main'}' needs, "
                "among the results to move; expected results that only moved ops use. Move what "
                "uses it too, or write it to a variable."
            )
    seen: set[Op] = set()
    for op in moved:
        for t in op.inputs:
            if t in made_by and made_by[t] not in seen:
                raise GraphError(
                    f"outline: got {op!r}, built at {op.where}, before the op that makes "
                    f"%{t.name}; expected it after."
                )
        seen.add(op)


def _stand_in(t: Tensor, values: dict[Tensor, Tensor]) -> Tensor:
    """What the current graph uses in place of an outside tensor; ``values`` holds all of them, by
    tensor.

    Tensors that share storage must share it inside too, so of each storage only the owner comes in.
    """
    if t not in values:
        if isinstance(t, Constant):
            values[t] = clone_constant(t)
        elif t._op is not None and t._op.definition.alias:
            values[t] = clone_op(t._op, lambda operand: _stand_in(operand, values)).outputs[0]
        elif owners := aliased(t):
            values[t] = _stand_in(owners[0], values)
        else:
            values[t] = graph_input(
                t.shape, t.dtype, t.name, by_ref=True, meta_shape=t.meta_shape or None
            )
    return values[t]


def _move(t: Tensor, target: Graph) -> None:
    del t._graph._tensors[t.name]
    t._graph, t._name = target, target._unique(t.name, target._tensors)
    target._tensors[t.name] = t
