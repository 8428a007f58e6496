"""Ops that belong to the transfers of weights: where they run here."""

from collections.abc import Iterable, Sequence

from popxl.context import ExecutionContext
from popxl.errors import GraphError
from popxl.graph import Graph, called_first
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

    The first run once after each upload of the variables, before the next run. What they make, and
    others use, is kept from run to run: in tensors like variables, to which it is copied. The last
    run with every run, so that a download finds what they stored; that is the same as once where
    they change nothing but rows that only they use.

    Raises:
        GraphError: an op for which that does not hold, or one that uses what is made later.
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
    _check_repeatable(after, program, summaries)
    _check_order([before, program, after])
    keeper = Keeper(graph, before)
    with graph:
        for op in (*program, *after):
            keeper.connect(op)
        copies = keeper.copies()
    graph._ops = [*before, *copies, *keeper.views, *program, *after]
    graph.kept = list(keeper.kept.values())


class Keeper:
    """Connects ops to what a fragment that does not run with them has made."""

    def __init__(self, graph: Graph, before: Iterable[Op]) -> None:
        self.graph, self.before = graph, set(before)
        self.kept: dict[Tensor, Tensor] = {}
        """What the fragment makes -> the tensor that keeps it."""
        self.views: list[Op] = []
        """The fragment's views of what it makes, once more."""
        self._again: dict[Op, Op] = {}

    def connect(self, op: Op) -> None:
        """Let an op use what is kept."""
        for name, argument in op.arguments.items():
            if any(t._op in self.before for t in op.inputs):
                op.set_argument(name, map_tensors(argument, self.value))

    def value(self, t: Tensor) -> Tensor:
        """The tensor to use for one that the fragment may have made."""
        op = t._op
        if op is None or op not in self.before:
            return t
        if op.definition.alias:
            if op not in self._again:
                self._again[op] = again = clone_op(op, self.value)
                again.execution = ExecutionContext.Normal
                self.views.append(again)
            return self._again[op].outputs[op.outputs.index(t)]
        if aliased(t):
            return self.value(aliased(t)[0])
        if t not in self.kept:
            self.kept[t] = self.graph._new_tensor(t.spec, f"{t.name}_kept")
        return self.kept[t]

    def copies(self) -> list[Op]:
        """Ops of the fragment that copy what it makes to where it is kept."""
        copies = []
        for t, home in self.kept.items():
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


def _check_repeatable(after: Sequence[Op], program: Sequence[Op], summaries: Summaries) -> None:
    """GraphError unless running these ops with every run gives what running them at the end
    gives.
    """
    made = {t for op in after for t in op.outputs}
    loads: dict[object, list[Op]] = {}
    for load in _transfers(program):
        if load.outputs:
            loads.setdefault(load.arguments["remote_buffer"], []).append(load)
    for op in after:
        if any(not summaries.roots(t) <= made for t in summaries.modified(op)):
            _fail(
                op,
                "a write to a tensor that was made elsewhere",
                "ops that give the same when they run again",
            )
        for store in _transfers([op]):
            slot = _slot(store.arguments["offset"])
            for load in (
                loads.get(store.arguments["remote_buffer"], ()) if not store.outputs else ()
            ):
                if None in (slot, other := _slot(load.arguments["offset"])) or slot == other:
                    _fail(
                        op,
                        f"a store to a slot that {load!r} of the program loads",
                        "a slot of its own",
                    )


def _transfers(ops: Iterable[Op]) -> list[Op]:
    """Remote loads and stores among ops and in the graphs that they call, each once."""
    own = list(ops)
    called = dict.fromkeys(graph for op in own for graph, _ in op.called())
    inner = [op for graph in called_first(*called) for op in graph.ops]
    return [op for op in (*own, *inner) if "remote" in op.definition.effects]


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


def _slot(offset: object) -> object:
    """The number of a slot, None if it is computed."""
    if isinstance(offset, Constant):
        return int(offset.host_value.reshape(-1)[0])
    return None if isinstance(offset, Tensor) else offset
