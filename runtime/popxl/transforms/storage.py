"""Who shares storage with whom, and what a graph changes: from the facts that ops declare."""

from typing import FrozenSet, List, Optional, Set, Tuple

from popxl.graph import Graph
from popxl.ir import Ir
from popxl.opdef import Op
from popxl.tensor import Variable
from popxl.values import Tensor

TRANSFERS = frozenset({"host", "remote"})
"""Effects of ops that give another result, or do harm, when they run once more."""

LASTING = TRANSFERS | {"print"}
"""Effects that count even where nothing reads the result."""


def aliased(t: Tensor) -> Tuple[Tensor, ...]:
    """Operands whose storage ``t`` is: those of an alias op (``reshape_``) or the one that its op writes to."""
    if t._op is None:
        return ()
    definition = t._op.definition
    if definition.alias:
        return t._op.viewed
    return (t._op.arguments[definition.writes[0]],) if definition.writes and t is t._op.outputs[0] else ()


def roots(t: Tensor) -> FrozenSet[Tensor]:
    """Tensors that own the storage of ``t``: itself, unless it aliases others."""
    found: Set[Tensor] = set()
    pending = [t]
    while pending:
        tensor = pending.pop()
        operands = aliased(tensor)
        pending.extend(operands)
        if not operands:
            found.add(tensor)
    return frozenset(found)


def modified(op: Op) -> List[Tensor]:
    """Operands whose storage the op really changes: for calls the by-reference inputs that the graph writes to."""
    if "control" not in op.definition.effects:
        return list(op.written)
    return [
        outer
        for graph, inputs in op.called()
        for inner, outer in zip(graph.inputs, inputs)
        if inner in modified_inputs(graph)
    ]


def modified_inputs(graph: Graph) -> Set[Tensor]:
    """By-reference inputs that a graph's ops change."""
    return modified_storage(graph) & graph._by_ref_inputs if graph._by_ref_inputs else set()


def modified_storage(graph: Graph) -> Set[Tensor]:
    """Owners of the storage that a graph's ops change, inputs among them."""
    return {root for op in graph.ops for t in modified(op) for root in roots(t)}


def changing_variables(ir: Ir) -> List[Variable]:
    """Variables that a run may change: in place, or by a store to the remote buffer that they lie in."""
    written = modified_storage(ir.main_graph)
    stored = {
        op.arguments["remote_buffer"]
        for graph in ir.graphs
        for op in graph.ops
        if "remote" in op.definition.effects and not op.outputs
    }
    return [
        v
        for v in ir.main_graph.variables
        if v in written or v.shard in written or v.location_info is not None and v.location_info.buffer in stored
    ]


def first_write(graph: Graph) -> Optional[Op]:
    """The first op that writes in place, None if there is none."""
    return next((op for op in graph.ops if modified(op)), None)


def has_effect(op: Op, effects: FrozenSet[str] = LASTING) -> bool:
    """Whether the op, or one in a graph that it calls, has one of these effects; default: all lasting ones."""
    return bool(op.definition.effects & effects) or any(
        has_effect(o, effects) for graph, _ in op.called() for o in graph.ops
    )
