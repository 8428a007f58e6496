"""Tensors that share storage, and what a graph changes: from the facts that ops declare."""

from collections.abc import Iterator

from popxl.graph import Graph
from popxl.ir import Ir
from popxl.opdef import Op
from popxl.tensor import Tensor, Variable

TRANSFERS = frozenset({"host", "remote"})
"""Effects of ops that give another result, or do harm, when they run once more."""

LASTING = TRANSFERS | {"print", "clock"}
"""Effects that count even where nothing reads the result."""


def aliased(t: Tensor) -> tuple[Tensor, ...]:
    """Operands whose storage ``t`` is: those of an alias op (``reshape_``) or the one that its op
    writes to.
    """
    if t._op is None:
        return ()
    definition = t._op.definition
    if definition.alias:
        return t._op.viewed
    return (
        (t._op.arguments[definition.writes[0]],)
        if definition.writes and t is t._op.outputs[0]
        else ()
    )


class Summaries:
    """What graphs change and do at any depth, and who owns the storage of tensors: each looked at
    once.

    Make one for a question, or for a pass over graphs that nobody adds ops to meanwhile: it does
    not see later ones.
    """

    def __init__(self) -> None:
        self._roots: dict[Tensor, frozenset[Tensor]] = {}
        self._storage: dict[Graph, frozenset[Tensor]] = {}
        self._effects: dict[Graph, frozenset[str]] = {}

    def roots(self, t: Tensor) -> frozenset[Tensor]:
        """Tensors that own the storage of ``t``: itself, unless it aliases others."""
        pending = [t]
        while pending:
            tensor = pending[-1]
            operands = aliased(tensor)
            unknown = [o for o in operands if o not in self._roots]
            if unknown:
                pending += unknown
                continue
            pending.pop()
            if len(operands) == 1:
                self._roots[tensor] = self._roots[operands[0]]
            else:
                self._roots[tensor] = frozenset().union(
                    *(self._roots[o] for o in operands)
                ) or frozenset((tensor,))
        return self._roots[t]

    def modified(self, op: Op) -> list[Tensor]:
        """Operands whose storage the op really changes: for calls those taken by reference that the
        graph writes to.
        """
        if "control" not in op.definition.effects:
            return list(op.written)
        return [
            outer for graph, inner, outer in borrowed(op) if inner in self.modified_storage(graph)
        ]

    def modified_storage(self, graph: Graph) -> frozenset[Tensor]:
        """Owners of the storage that a graph's ops change, inputs among them."""
        if graph not in self._storage:
            self._storage[graph] = frozenset(
                r for op in graph.ops for t in self.modified(op) for r in self.roots(t)
            )
        return self._storage[graph]

    def first_write(self, graph: Graph) -> Op | None:
        """The first op that writes in place, None if there is none."""
        return next((op for op in graph.ops if self.modified(op)), None)

    def has_effect(self, op: Op, effects: frozenset[str] = LASTING) -> bool:
        """Whether the op, or one in a graph that it calls, has one of these effects; default: all
        lasting ones.
        """
        called = op.called()
        return bool(op.definition.effects & effects) or any(
            self.effects(graph) & effects for graph, _ in called
        )

    def effects(self, graph: Graph) -> frozenset[str]:
        """Effects of a graph's ops, and of those in graphs that it calls."""
        if graph not in self._effects:
            own = {effect for op in graph.ops for effect in op.definition.effects}
            self._effects[graph] = frozenset(
                own.union(*(self.effects(called) for called in graph.called_graphs))
            )
        return self._effects[graph]


def borrowed(op: Op) -> Iterator[tuple[Graph, Tensor, Tensor]]:
    """(graph, its input, the caller's tensor) for each input that a call, repeat or conditional
    gives by reference.
    """
    for graph, inputs in op.called():
        if op._modified_here or graph._by_ref_inputs:
            yield from (
                (graph, i, o) for i, o in zip(graph._inputs, inputs) if op.is_by_reference(i)
            )


def changing_variables(ir: Ir) -> list[Variable]:
    """Variables that a run may change: in place, or by a store to the remote buffer that they lie
    in.
    """
    written = Summaries().modified_storage(ir.main_graph)
    stored = {
        op.arguments["remote_buffer"]
        for graph in ir.graphs
        for op in graph.ops
        if "remote" in op.definition.effects and not op.outputs
    }
    return [
        v
        for v in ir.main_graph.variables
        if v in written
        or v.shard in written
        or v.location_info is not None
        and v.location_info.buffer in stored
    ]
