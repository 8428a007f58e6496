"""AdamW's whole update, as `AdamOptimizerStep` builds it, as one op; and with what undoes it where
a condition is false.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from popxl_engine.ir import Block, Value
from popxl_engine.ops.adamw import STATE, adamw_, adamw_where_
from popxl_engine.passes.rewriter import Rewriter, fused


def fuse_adamw(block: Block) -> Block:
    """Both moments, Adam's update and its subtraction from the weight; and what restores all three
    where a condition is false.
    """
    rewriter = Rewriter(block)
    for i, instr in rewriter.ops("scaled_add_"):
        found = _update(rewriter, i)
        if found is None:
            continue
        moments = (rewriter.instrs[n].source for n in found.absorbed[:2])
        writers = tuple(op for op in (instr.source, *moments) if op is not None)
        condition, restoring = _condition(rewriter, i, found)
        arguments = found.operands
        if condition is not None:
            arguments = {"condition": condition, **arguments}
        definition = adamw_ if condition is None else adamw_where_
        update = fused(instr, definition, arguments, writers=writers)
        rewriter.replace(i, update, *found.absorbed, *restoring)
    return rewriter.result()


class _Update(NamedTuple):
    """An update that is found."""

    operands: dict[str, Any]
    """The operands of the fused op."""
    absorbed: list[int]
    """Positions of what it does: those that change the moments come first."""


def _update(rewriter: Rewriter, index: int) -> _Update | None:
    """The update that ends in a subtraction from a weight."""
    last = rewriter.instrs[index].arguments
    var = last["X"]
    maker = rewriter.made_by(last["Y"], "adam_updater")
    if maker is None or last["a"] != 1 or not isinstance(var, Value):
        return None
    adam = rewriter.instrs[maker].arguments
    first = _writer(rewriter, adam["acc_first_order"], "accumulate_moving_average_", maker)
    second = _writer(rewriter, adam["acc_second_order"], "accumulate_moving_average_square_", maker)
    if first is None or second is None or adam["time_step"] is None:
        return None
    m, v = rewriter.instrs[first].arguments, rewriter.instrs[second].arguments
    are_same = m["X"] is v["X"] and m["f"] == adam["beta1"] and v["f"] == adam["beta2"]
    if not are_same or adam["weight"] not in (None, var):
        return None
    gradient, scale, scaling = _scaled(rewriter, m["X"], (first, second))
    absorbed = [first, second, maker, *scaling]
    hyper = {name: adam[name] for name in ("beta1", "beta2", "epsilon", "weight_decay")}
    operands = {
        "var": var,
        "grad": gradient,
        "scale": scale,
        "first": m["t"],
        "second": v["t"],
        "step": adam["time_step"],
        "minus_lr": last["b"],
        **hyper,
    }
    return _Update(operands, absorbed) if _may_be_one(rewriter, index, absorbed, operands) else None


def _may_be_one(
    rewriter: Rewriter, index: int, absorbed: Sequence[int], operands: Mapping[str, Any]
) -> bool:
    """Whether all may run where the last of them is, nobody sees what is between, and no factor is
    what the update writes, or its step, which may be counted in between.
    """
    state = [operands[name] for name in STATE]
    written = {rewriter.storage(v) for v in state}
    others = [v for name, v in operands.items() if name not in STATE and isinstance(v, Value)]
    step = rewriter.storage(operands["step"])
    apart = (
        len(written) == len(state)
        and all(rewriter.storage(v) not in written for v in others)
        and [rewriter.storage(v) for v in others].count(step) == 1
    )
    seen = any(
        not rewriter.used_only_by(v, absorbed)
        for i in absorbed[:2]
        for v in rewriter.instrs[i].outputs
    )
    counted = rewriter.maker(operands["step"])
    return apart and not seen and rewriter.may_run_late(absorbed, index, state, counted)


def _writer(rewriter: Rewriter, moment: Value, name: str, before: int) -> int | None:
    """What updated a moment in place just before its only other use."""
    for i in range(before - 1, -1, -1):
        instr = rewriter.instrs[i]
        if instr.is_op(name) and moment in (instr.arguments["t"], *instr.outputs):
            return i
    return None


def _scaled(
    rewriter: Rewriter, gradient: Value, users: Sequence[int]
) -> tuple[Value, Any, list[int]]:
    """(gradient, scale, absorbed): a product with one number is taken into the update."""
    index = rewriter.maker(gradient, "mul")
    if index is None or not rewriter.used_only_by(gradient, users):
        return gradient, None, []
    a = rewriter.instrs[index].arguments
    if a["rhs"].nelms != 1 or a["lhs"].shape != gradient.shape:
        return gradient, None, []
    constant = rewriter.scalar(a["rhs"])
    return a["lhs"], a["rhs"] if constant is None else constant, [index]


# What undoes an update


def _condition(rewriter: Rewriter, last: int, update: _Update) -> tuple[Value | None, list[int]]:
    """The condition without which weight and moments are restored, and what keeps and
    restores them.

    None, and nothing, where something else sees what they make, or what they write before they
    have.
    """
    state = [update.operands[name] for name in STATE]
    restored = [_restored(rewriter, v, last, min(update.absorbed[:2])) for v in state]
    conditions = {condition for condition, _ in restored if condition is not None}
    restoring = [i for _, indices in restored for i in indices]
    if len(conditions) != 1 or len(restoring) != 9:
        return None, []
    (condition,) = conditions
    storages = {rewriter.storage(v) for v in state}
    between = (
        i
        for i in range(last + 1, max(restoring))
        if i not in restoring and i not in rewriter.removed
    )
    maker = rewriter.maker(condition)
    if (maker is not None and maker >= last) or any(
        rewriter.instrs[i].written() or rewriter.may_see(i, storages) for i in between
    ):
        return None, []
    return condition, restoring


def _restored(
    rewriter: Rewriter, v: Value, last: int, first: int
) -> tuple[Value | None, list[int]]:
    """The condition that chooses between a value and what was kept of it, and the positions of what
    keeps, chooses, and restores.

    They are to be before position ``first``, of the first that changes it, and after ``last``.
    """
    storage = rewriter.storage(v)
    for i, instr in rewriter.ops("copy_var_update_"):
        if i <= last or rewriter.storage(instr.arguments["t"]) is not storage:
            continue
        chosen = rewriter.made_by(instr.arguments["X"], "where")
        where = {} if chosen is None else rewriter.instrs[chosen].arguments
        kept = rewriter.made_by(where.get("rhs"), "identity")
        if chosen is None or kept is None or kept >= first or chosen < last:
            break
        source = rewriter.instrs[kept].arguments["t"]
        is_whole = rewriter.storage(where["lhs"]) is storage is rewriter.storage(source)
        is_seen = any(not rewriter.used_only_by(out, ()) for out in instr.outputs)
        is_one = where["condition"].nelms == 1
        if not is_whole or is_seen or not is_one or rewriter.writes_between(kept, first):
            break
        return where["condition"], [kept, chosen, i]
    return None, []
