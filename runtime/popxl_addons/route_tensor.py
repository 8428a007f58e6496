"""Giving a graph a tensor of a graph that calls it, through all calls in between."""

from typing import Any, Dict, Iterable, List, Optional, Tuple, Union

import popxl
from popxl import Graph, Tensor
from popxl.graph import called_first
from popxl.opdef import Op

INPUTS = {"graph": "inputs", "then_branch": "then_inputs", "else_branch": "else_inputs"}
"""Arguments of the ops that call graphs: the graph, and what it is given."""


def is_subgraph(parent: Graph, subgraph: Graph) -> bool:
    """Whether ``parent`` calls ``subgraph``, itself or through other graphs. No graph is its own subgraph."""
    return subgraph is not parent and subgraph in called_first(parent)


def route_tensor_into_graph(
    tensor: Tensor, graph: Optional[Graph] = None, modified: Union[bool, Iterable[Any]] = False
) -> Tensor:
    """Adds an input to ``graph``, and to the graphs on the way to it, that every call fills with ``tensor``.

    A loop gives the same tensor to all of its iterations.

    Args:
        tensor: of a graph that calls ``graph``, at any depth.
        graph: default: the current one.
        modified: whether ``graph`` writes to the tensor; the inputs are by reference then. A list of regions that it
            writes to counts as a yes, an empty one as a no.
    Returns:
        ``graph``'s new input; ``tensor`` itself where it already is in ``graph``.
    Raises:
        ValueError: the tensor's graph does not call ``graph``, or a graph on the way is also called from somewhere that
            the tensor cannot reach, or from before the op that makes it.
    """
    target = popxl.gcg() if graph is None else graph
    if tensor in target:
        return tensor
    source = next(g for g in target.ir.graphs if tensor in g) if tensor.ir == target.ir else None
    if source is None or not is_subgraph(source, target):
        where = "another Ir" if source is None else f"graph '{source.name or 'main'}'"
        raise ValueError(
            f"route_tensor_into_graph: got %{tensor.name} of {where}, which does not call graph "
            f"'{target.name or 'main'}'; expected a tensor of a graph that does. Make the calls first."
        )
    on_the_way = [g for g in called_first(source) if g is target or is_subgraph(g, target)]
    calls = {g: _calls_of(g) for g in on_the_way if g is not source}
    by_ref = modified if isinstance(modified, bool) else bool(list(modified))
    _check(tensor, source, calls, by_ref)
    local: Dict[Graph, Tensor] = {source: tensor}
    for g in reversed([g for g in on_the_way if g is not source]):
        with g:
            local[g] = popxl.graph_input(tensor.shape, tensor.dtype, tensor.name, by_ref, tensor.meta_shape or None)
        for op, argument in calls[g]:
            op.set_argument(argument, (*op.arguments[argument], local[op.graph]))
    return local[target]


def _calls_of(graph: Graph) -> List[Tuple[Op, str]]:
    """Every call of a graph: the op, and the argument that holds what it gives."""
    return [
        (op, inputs)
        for caller in graph.ir.graphs
        for op in caller.ops
        for called, inputs in INPUTS.items()
        if op.arguments.get(called) is graph
    ]


def _check(tensor: Tensor, source: Graph, calls: Dict[Graph, List[Tuple[Op, str]]], by_ref: bool) -> None:
    made = next((i for i, op in enumerate(source.ops) if tensor in op.outputs), -1)
    too_early = set(source.ops[: max(made, 0)])
    where = f"route_tensor_into_graph: got %{tensor.name} of graph '{source.name or 'main'}' for graph"
    for g, sites in calls.items():
        for op, argument in sites:
            if op.graph is not source and op.graph not in calls:
                raise ValueError(
                    f"{where} '{g.name}', which is also called in graph '{op.graph.name or 'main'}' at {op.where}; "
                    "expected calls from graphs that the tensor reaches. Pass it in as a graph input."
                )
            if op in too_early:
                raise ValueError(
                    f"{where} '{g.name}', which is called at {op.where} before the tensor is made; expected a tensor "
                    "made before the first call."
                )
            if by_ref and argument != "inputs":
                raise ValueError(
                    f"{where} '{g.name}' to be modified, which is a branch of a conditional, made at {op.where}; "
                    "expected graphs that take inputs by reference. Return the new value instead."
                )
