"""Ops that belong to the transfers of weights: where they run here."""

from typing import Iterable, List, Sequence, Set

from popxl.context import ExecutionContext
from popxl.errors import GraphError
from popxl.ir import Ir
from popxl.opdef import Op
from popxl.transforms.storage import has_effect, modified, roots
from popxl.values import Constant, Tensor

UNSEEN = frozenset({"host", "print"})
"""Effects whose number of occurrences somebody sees."""


def arrange_fragments(ir: Ir) -> None:
    """Reorder the main graph: first the ops of WeightsFromHostFragment, last those of WeightsToHostFragment.

    State exists once here, so that nothing travels when a session attaches or leaves: what the host reads are the
    remote rows themselves. Loading state from its rows before every run and storing it after every run therefore gives
    the values that loading it once, keeping it on the device and storing it at the end gives.

    Raises:
        GraphError: an op for which that does not hold, or one that uses what is made later.
    """
    graph = ir.main_graph
    parts = {context: [op for op in graph.ops if op.execution is context] for context in ExecutionContext}
    before, after = parts[ExecutionContext.WeightsFromHostFragment], parts[ExecutionContext.WeightsToHostFragment]
    if not before and not after:
        return
    program = parts[ExecutionContext.Normal]
    for part in (before, after):
        made = {t for op in part for t in op.outputs}
        for op in part:
            _check_repeatable(op, made)
    _check_order([before, program, after])
    changed, prepared = ({root for op in part for t in modified(op) for root in roots(t)} for part in (program, before))
    for op in before:
        for t in op.outputs:
            if t in changed and (t in prepared or not any(_is_way_back(op, t, store) for store in after)):
                _fail(op, f"%{t.name}, which the program changes", "a remote_load of a slot that it is stored to")
        _check_slot(op, _stores(program), after)
    graph._ops = [*before, *program, *after]


def _fail(op: Op, got: str, expected: str) -> None:
    raise GraphError(f"{op.execution.name}: got {got} by {op!r}, built at {op.where}; expected {expected}.")


def _check_repeatable(op: Op, made: Set[Tensor]) -> None:
    """GraphError unless running the op once more changes nothing. ``made``: by the ops that run again with it."""
    stores = op.definition.name == "remote_store"
    if has_effect(op, UNSEEN):
        _fail(op, "a stream or a print", "ops that give the same when they run again")
    if any(not roots(t) <= made for t in modified(op)):
        _fail(op, "a write to a tensor that was made elsewhere", "ops that give the same when they run again")
    if any(has_effect(o, frozenset({"remote"})) for graph, _ in op.called() for o in graph.ops):
        _fail(op, "a call that loads or stores", "loads and stores outside called graphs")
    if stores and op.execution is ExecutionContext.WeightsFromHostFragment:
        _fail(op, "a store", "it among those of WeightsToHostFragment")


def _stores(ops: Iterable[Op]) -> List[Op]:
    """Stores among ops and in the graphs that they call."""
    inner = [o for op in ops for graph, _ in op.called() for o in _stores(graph.ops)]
    return [op for op in ops if op.definition.name == "remote_store"] + inner


def _check_slot(load: Op, stores: Iterable[Op], after: Iterable[Op]) -> None:
    """GraphError if what a fragment loads is another value after a run."""
    if load.definition.name != "remote_load":
        return
    buffer, slot = load.arguments["remote_buffer"], _slot(load.arguments["offset"])
    for store in (*stores, *_stores(after)):
        other = _slot(store.arguments["offset"])
        is_apart = store.arguments["remote_buffer"] is not buffer or None not in (slot, other) and slot != other
        if not is_apart and not (store in after and _is_way_back(load, load.outputs[0], store)):
            _fail(load, f"a slot that {store!r} stores to", "it to keep its value, or to be stored what was loaded")


def _check_order(parts: Sequence[List[Op]]) -> None:
    """GraphError unless every operand is made in the op's own part or in an earlier one."""
    later: Set[Tensor] = {t for part in parts for op in part for t in op.outputs}
    for part in parts:
        later -= {t for op in part for t in op.outputs}
        for op in part:
            for t in op.inputs:
                if t in later:
                    _fail(op, f"a use of %{t.name}", "a tensor that is made before the weights travel this way")


def _is_way_back(load: Op, t: Tensor, store: Op) -> bool:
    """Whether ``store`` puts ``t`` where ``load`` took it from."""
    if load.definition.name != "remote_load" or store.definition.name != "remote_store":
        return False
    a, b = load.arguments, store.arguments
    is_same_slot = a["offset"] is b["offset"] or _slot(a["offset"]) == _slot(b["offset"]) is not None
    return a["remote_buffer"] is b["remote_buffer"] and is_same_slot and roots(b["t"]) == {t}


def _slot(offset: object) -> object:
    """The number of a slot, None if it is computed."""
    if isinstance(offset, Constant):
        return int(offset.host_value.reshape(-1)[0])
    return None if isinstance(offset, Tensor) else offset
