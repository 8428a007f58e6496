"""Ops that belong to the transfers of weights: where they run here."""

from collections.abc import Iterable, Sequence

from popxl.context import ExecutionContext
from popxl.errors import GraphError
from popxl.graph import Graph
from popxl.ir import Ir
from popxl.opdef import Op, map_tensors
from popxl.ops import var_updates
from popxl.tensor import Constant, Tensor
from popxl.transforms.clone import clone_op, placed_like
from popxl.transforms.storage import Summaries, aliased

UNSEEN = frozenset({"host", "print"})
"""Effects whose number of occurrences somebody sees."""
FROM_HOST, TO_HOST = (
    ExecutionContext.WeightsFromHostFragment,
    ExecutionContext.WeightsToHostFragment,
)


def arrange_fragments(ir: Ir) -> None:
    """Reorder the main graph: first the ops of WeightsFromHostFragment, last those of
    WeightsToHostFragment.

    The first run once after each upload of the variables, before the next run. The last run once
    for each download of what runs have changed, before it. What a part makes, and a later one uses,
    is kept: in tensors like variables, to which it is copied.

    Raises:
        GraphError: an op that somebody would see run, or one that uses what is made later.
    """
    graph = ir.main_graph
    parts = {
        context: [op for op in graph.ops if op.execution is context] for context in ExecutionContext
    }
    before, program, after = parts[FROM_HOST], parts[ExecutionContext.Normal], parts[TO_HOST]
    if not before and not after:
        return
    summaries = Summaries()
    for op in (*before, *after):
        if summaries.has_effect(op, UNSEEN):
            _fail(op, "a stream or a print", "ops that nobody sees run")
        if any(
            isinstance(root, Constant)
            for t in summaries.modified(op)
            for root in summaries.roots(t)
        ):
            _fail(op, "a write to a constant", "a write to a variable or to what ops make")
    _check_order([before, program, after])
    uploaded = Keeper(graph, before, ExecutionContext.Normal)
    before += uploaded.copies_for([*program, *after])
    program = [*uploaded.views, *program]
    made = Keeper(graph, program, TO_HOST)
    program += made.copies_for(after)
    graph._ops = [*before, *program, *made.views, *after]
    graph.retained = [*uploaded.retained.values(), *made.retained.values()]


class Keeper:
    """Connects ops to what a part of the main graph that does not run with them has made.

    Args:
        before: the ops of that part.
        context: of the ops that use it.
    """

    def __init__(self, graph: Graph, before: Iterable[Op], context: ExecutionContext) -> None:
        self.graph, self.before, self.context = graph, set(before), context
        self.retained: dict[Tensor, Tensor] = {}
        """What the part makes -> the tensor that keeps it."""
        self.views: list[Op] = []
        """The part's views of what it makes, once more."""
        self._again: dict[Op, Op] = {}

    def copies_for(self, ops: Iterable[Op]) -> list[Op]:
        """Let ops use what is kept. Returns ops, to run with the part, that copy it there."""
        with self.graph:
            for op in ops:
                self.connect(op)
            return self.copies()

    def connect(self, op: Op) -> None:
        """Let an op use what is kept."""
        for name, argument in op.arguments.items():
            if any(t._op in self.before for t in op.inputs):
                op.set_argument(name, map_tensors(argument, self.value))

    def value(self, t: Tensor) -> Tensor:
        """The tensor to use for one that the part may have made."""
        op = t._op
        if op is None or op not in self.before:
            return t
        if op.definition.alias:
            if op not in self._again:
                self._again[op] = again = clone_op(op, self.value)
                again.execution = self.context
                self.views.append(again)
            return self._again[op].outputs[op.outputs.index(t)]
        if aliased(t):
            return self.value(aliased(t)[0])
        if t not in self.retained:
            self.retained[t] = self.graph._new_tensor(t.spec, f"{t.name}_kept")
        return self.retained[t]

    def copies(self) -> list[Op]:
        """Ops of the part that copy what it makes to where it is kept."""
        copies = []
        for t, home in self.retained.items():
            assert t._op is not None
            with placed_like(t._op):
                copy = var_updates.copy_var_update_(home, t)._op
            assert copy is not None
            copy.source = t._op.source
            copies.append(copy)
        return copies


def _fail(op: Op, got: str, expected: str) -> None:
    raise GraphError(
        f"{op.execution.name}: got {got} by {op!r}, built at {op.where}; expected {expected}."
    )


def _check_order(parts: Sequence[list[Op]]) -> None:
    """GraphError unless every operand is made in the op's own part or in an earlier one."""
    later: set[Tensor] = {t for part in parts for op in part for t in op.outputs}
    for part in parts:
        later -= {t for op in part for t in op.outputs}
        for op in part:
            for t in op.inputs:
                if t in later:
                    _fail(
                        op,
                        f"a use of %{t.name}",
                        "a tensor that is made before the weights travel this way",
                    )
