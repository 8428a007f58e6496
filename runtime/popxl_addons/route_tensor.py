"""Giving a graph a tensor of a graph that calls it, through all calls in between."""

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import popxl
from popxl import Graph, Tensor
from popxl.graph import called_first
from popxl.opdef import Op

INPUTS = {"graph": "inputs", "then_branch": "then_inputs", "else_branch": "else_inputs"}
"""Arguments of the ops that call graphs: the graph, and what it is given."""
_ROUTED: "WeakKeyDictionary[Graph, dict[str, str]]" = WeakKeyDictionary()
"""The tensor's id -> the input's name, for graphs that tensors were routed into."""


def is_subgraph(parent: Graph, subgraph: Graph) -> bool:
    """Whether ``parent`` calls ``subgraph``, itself or through other graphs. No graph is its own
    subgraph.
    """
    return subgraph is not parent and subgraph in called_first(parent)


def route_tensor_into_graph(
    tensor: Tensor, graph: Graph | None = None, modified: bool | Iterable[Any] = False
) -> Tensor:
    """Adds an input to ``graph``, and to the graphs on the way to it, that every call fills with
    ``tensor``.

    Graphs that were given the tensor so before keep their input. A loop gives the same tensor to
    all of its iterations.

    Args:
        tensor: of a graph that calls ``graph``, at any depth.
        graph: default: the current one.
        modified: whether ``graph`` writes to the tensor; the inputs are by reference then. A list
            of regions that it writes to counts as a yes, an empty one as a no.
    Returns:
        ``graph``'s input; ``tensor`` itself where it already is in ``graph``.
    Raises:
        ValueError: the tensor's graph does not call ``graph``, or a graph on the way is also called
            from somewhere that the tensor cannot reach, or from before the op that makes it.
    """
    target = popxl.gcg() if graph is None else graph
    if tensor in target:
        return tensor
    source = next(g for g in target.ir.graphs if tensor in g) if tensor.ir == target.ir else None
    if source is None or not is_subgraph(source, target):
        where = "another Ir" if source is None else f"graph '{source.name or 'main'}'"
        raise ValueError(
            f"route_tensor_into_graph: got %{tensor.name} of {where}, which does not call graph "
            f"'{target.name or 'main'}'; expected a tensor of a graph that does. Make the calls "
            "first."
        )
    by_ref = modified if isinstance(modified, bool) else bool(list(modified))
    on_the_way = [
        g
        for g in called_first(source)
        if g is not source and (g is target or is_subgraph(g, target))
    ]
    local: dict[Graph, Tensor] = {source: tensor}
    local.update((g, found) for g in on_the_way if (found := _routed(tensor, g)) is not None)
    changing = [
        g for g in on_the_way if g not in local or by_ref and local[g] not in g._by_ref_inputs
    ]
    calls = {g: _calls_of(g) for g in changing}
    _check(tensor, local, calls, by_ref)
    for g in reversed(changing):
        if g in local:
            g._by_ref_inputs.add(local[g])
            continue
        with g:
            local[g] = popxl.graph_input(
                tensor.shape, tensor.dtype, tensor.name, by_ref, tensor.meta_shape or None
            )
        _ROUTED.setdefault(g, {})[tensor.id] = local[g].name
        for op, argument in calls[g]:
            op.set_argument(argument, (*op.arguments[argument], local[op.graph]))
    return local[target]


def _routed(tensor: Tensor, graph: Graph) -> Tensor | None:
    """The input that a graph has for a tensor from before."""
    name = _ROUTED.get(graph, {}).get(tensor.id)
    return graph.inputs_by_name[name] if name is not None else None


def _calls_of(graph: Graph) -> list[tuple[Op, str]]:
    """Every call of a graph: the op, and the argument that holds what it gives."""
    return [
        (op, inputs)
        for caller in graph.ir.graphs
        for op in caller.ops
        for called, inputs in INPUTS.items()
        if op.arguments.get(called) is graph
    ]


def _check(
    tensor: Tensor,
    local: Mapping[Graph, Tensor],
    calls: dict[Graph, list[tuple[Op, str]]],
    by_ref: bool,
) -> None:
    """ValueError for calls that cannot be given the tensor. ``local``: graphs that have it
    already.
    """
    source = next(iter(local))
    made = next((i for i, op in enumerate(source.ops) if tensor in op.outputs), -1)
    too_early = set(source.ops[: max(made, 0)])
    where = (
        f"route_tensor_into_graph: got %{tensor.name} of graph '{source.name or 'main'}' for graph"
    )
    for g, sites in calls.items():
        for op, argument in sites:
            if op.graph not in local and op.graph not in calls:
                raise ValueError(
                    f"{where} '{g.name}', which is also called in graph "
                    f"'{op.graph.name or 'main'}' at {op.where}; expected calls from graphs that "
                    "the tensor reaches. Pass it in as a graph input."
                )
            if op in too_early:
                raise ValueError(
                    f"{where} '{g.name}', which is called at {op.where} before the tensor is "
                    "made; expected a tensor made before the first call."
                )
            if by_ref and argument != "inputs":
                raise ValueError(
                    f"{where} '{g.name}' to be modified, which is a branch of a conditional, made "
                    f"at {op.where}; expected graphs that take inputs by reference. Return the "
                    "new value instead."
                )
