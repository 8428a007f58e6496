"""Emitting the ops of one graph again in another, and removing ops that nothing needs."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

from popxl.context import (
    _execution_context,
    from_source,
    get_current_context,
    io_tiles,
    ipu,
    name_scope,
)
from popxl.errors import GraphError
from popxl.graph import Graph
from popxl.opdef import Op, emit, map_tensors
from popxl.placement import DEFAULT_IPU, NO_IPU
from popxl.tensor import Constant, Tensor, make_constant
from popxl.transforms.storage import Summaries


@contextmanager
def placed_like(op: Op) -> Iterator[None]:
    """Ops made inside get the op's name scope, virtual device, tile set, execution context and
    source line.
    """
    scope = op.name.rpartition("/")[0]
    is_placed = op.ipu is not None or get_current_context().ipu_of_ops is not None
    device = DEFAULT_IPU if op.ipu is None else None if op.ipu == NO_IPU else op.ipu
    with (
        name_scope(scope) if scope else nullcontext(),
        ipu(device) if is_placed else nullcontext(),
        io_tiles() if op.io_tiles else nullcontext(),
        _execution_context(op.execution),
        from_source(op.source),
    ):
        yield


def clone_op(op: Op, value: Callable[[Tensor], Tensor]) -> Op:
    """Emit one op in the current graph on ``value(operand)`` for each operand, with its names and
    source line.

    Outside any block of `in_sequence` it is ordered as the op is.
    """
    arguments = {name: map_tensors(argument, value) for name, argument in op.arguments.items()}
    with placed_like(op):
        new = emit(op.definition, arguments)
    new._modified_here = set(op._modified_here)
    if new.sequence_block is None:
        new.sequence_block = op.sequence_block
    for old, result in zip(op.outputs, new.outputs):
        new.graph._rename(result, old.name)
    return new


def clone_constant(constant: Constant) -> Constant:
    """The same constant, by value and name, in the current graph; the array is shared."""
    copy = make_constant(constant.host_value, constant.dtype, None)
    copy._graph._rename(copy, constant.name)
    return copy


def clone_ops(graph: Graph, mapping: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """Emit all ops of a graph again in the current graph; ``graph`` is left as it is.

    The ops round from the current graph's seed, not from the graph's own
    (`popxl.extensions.round_from`).

    Args:
        mapping: the current graph's tensor for each input (and, for the main graph, each variable)
            that the ops use. Constants are made anew unless they are in it.
    Returns:
        The current graph's tensor for every tensor that has one: the mapping, constants, results.
    Raises:
        GraphError: an operand that is neither in the mapping, nor a constant, nor a result.
    """
    values = dict(mapping)

    def value(t: Tensor) -> Tensor:
        if t not in values:
            if not isinstance(t, Constant):
                raise GraphError(
                    f"clone_ops: got no tensor for %{t.name}: {t.spec} of graph "
                    f"'{graph.name or 'main'}'; expected one for each input that its ops use. Add "
                    "it to the mapping."
                )
            values[t] = clone_constant(t)
        return values[t]

    for op in graph.ops:
        values.update(zip(op.outputs, clone_op(op, value).outputs))
    for t in graph.outputs:
        value(t)
    return values


def remove_ops(graph: Graph, dead: Iterable[Op]) -> None:
    """Take ops and their results out of a graph. Nothing that stays may use them."""
    gone = set(dead)
    graph._ops = [op for op in graph._ops if op not in gone]
    called: set[Graph] = set()
    for op in gone:
        for t in op.outputs:
            del graph._tensors[t.name]
        if op.definition.name == "call":
            called.add(op.arguments["graph"])
    for g in called:
        g._call_sites = [op for op in g._call_sites if op not in gone]


def prune(graph: Graph, summaries: Summaries | None = None) -> None:
    """Remove ops and constants that no output, by-reference input, variable or lasting effect
    needs.

    Args:
        summaries: of the graphs that it calls, where they are known; nothing may be known of
            itself.
    """
    known = summaries or Summaries()
    needed: set[Tensor] = set(graph.outputs)
    kept_storage = {
        root
        for t in (*graph.outputs, *graph._by_ref_inputs, *graph.variables)
        for root in known.roots(t)
    }
    dead = []
    for op in reversed(graph._ops):
        writes_needed = any(not kept_storage.isdisjoint(known.roots(t)) for t in known.modified(op))
        if writes_needed or not needed.isdisjoint(op.outputs) or known.has_effect(op):
            needed.update(op.inputs)
            kept_storage.update(root for t in op.inputs for root in known.roots(t))
        else:
            dead.append(op)
    remove_ops(graph, dead)
    unused = {constant for constant in graph.constants if constant not in needed}
    graph._constants = [constant for constant in graph._constants if constant not in unused]
    for constant in unused:
        del graph._tensors[constant.name]
