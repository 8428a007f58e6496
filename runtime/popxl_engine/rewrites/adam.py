"""AdamW's whole update as one op."""

from typing import Any, Dict, List, Optional, Sequence, Tuple

from popxl.graph import Graph
from popxl.opdef import flatten
from popxl.values import Tensor

from popxl_engine.ops.adamw import MOMENTS, adamw_, adamw_where_
from popxl_engine.rewrites.match import Steps, fused_step, scalar_constant, writes
from popxl_engine.steps import Step

Options = Dict[str, Any]


def fuse_adam(steps: List[Step], graph: Graph) -> List[Step]:
    """Both moments, Adam's update and its subtraction from the weight, as `AdamOptimizerStep`
    builds them.

    So is what puts all three back as they were where a condition is false.
    """
    found = Steps(steps, graph)
    for i, step in enumerate(steps):
        if step.definition.name == "scaled_add_" and (match := _match(found, i)) is not None:
            absorbed = match.pop("absorbed")
            writers = (step.source, *(steps[n].source for n in absorbed[:2]))
            condition, restoring = _condition(found, i, match, absorbed)
            if restoring:
                arguments = {"condition": condition, **match}
                made = fused_step(adamw_where_, arguments, step.outputs, step.source, writers)
            else:
                made = fused_step(adamw_, match, step.outputs, step.source, writers)
            found.replace(i, made)
            found.replace(i, found.steps[i], *absorbed, *restoring)
    return found.result()


def _condition(
    found: Steps, last: int, match: Options, absorbed: Sequence[int]
) -> Tuple[Optional[Tensor], List[int]]:
    """The condition without which var and moments are put back as they were, and the steps that
    keep and restore them.

    None, and no steps, where something else sees what they make, or what they write before they
    have.
    """
    state = [match[name] for name in ("var", "first", "second")]
    restored = [_restored(found, t, last, min(absorbed[:2])) for t in state]
    conditions = {where["condition"] for where, _ in restored if where is not None}
    steps = [i for _, indices in restored for i in indices]
    if len(conditions) != 1 or len(steps) != 9:
        return None, []
    (condition,) = conditions
    origins = {found.origin(t) for t in state}
    between = (i for i in range(last + 1, max(steps)) if i not in steps and i not in found.removed)
    if found.maker.get(condition, -1) >= last or any(
        writes(found.steps[i])
        or any(found.origin(t) in origins for t in flatten(found.steps[i].arguments.values()))
        for i in between
    ):
        return None, []
    return condition, steps


def _restored(
    found: Steps, t: Tensor, last: int, first: int
) -> Tuple[Optional[Options], List[int]]:
    """What chooses between a tensor and what was kept of it, and the steps that keep, choose, and
    restore.

    They are to be before step ``first``, the first that changes it, and after ``last``.
    """
    for i in range(last + 1, len(found.steps)):
        step = found.steps[i]
        if step.definition.name != "copy_var_update_" or found.origin(
            step.arguments["t"]
        ) is not found.origin(t):
            continue
        chosen = found.made_by(step.arguments["X"], "where")
        where = {} if chosen is None else found.steps[chosen].arguments
        kept = found.made_by(where.get("rhs"), "identity")
        if chosen is None or kept is None or not kept < first or chosen < last:
            break
        is_whole = (
            found.origin(where["lhs"])
            is found.origin(t)
            is found.origin(found.steps[kept].arguments["t"])
        )
        seen = any(not found.used_only_by(out, ()) for out in step.outputs)
        if (
            not is_whole
            or seen
            or where["condition"].nelms != 1
            or found.writes_between(kept, first)
        ):
            break
        return where, [kept, chosen, i]
    return None, []


def _match(found: Steps, index: int) -> Optional[Dict[str, Any]]:
    last = found.steps[index].arguments
    var, minus_lr = last["X"], last["b"]
    made = found.made_by(last["Y"], "adam_updater")
    if made is None or last["a"] != 1 or not isinstance(var, Tensor):
        return None
    adam = found.steps[made].arguments
    first = _writer(found, adam["acc_first_order"], "accumulate_moving_average_", made)
    second = _writer(found, adam["acc_second_order"], "accumulate_moving_average_square_", made)
    if first is None or second is None or adam["time_step"] is None:
        return None
    m, v = found.steps[first].arguments, found.steps[second].arguments
    same = m["X"] is v["X"] and m["f"] == adam["beta1"] and v["f"] == adam["beta2"]
    plain = {m["t"].dtype.name, v["t"].dtype.name} <= {*MOMENTS} and adam["weight"] in (None, var)
    if not same or not plain:
        return None
    gradient, scale, absorbed = _scaled(found, m["X"], (first, second))
    absorbed = [first, second, made, *absorbed]
    written = (var, m["t"], v["t"])
    apart = {found.origin(t) for t in (*written, gradient, adam["time_step"])}
    seen = [
        t
        for i in (first, second)
        for t in found.steps[i].outputs
        if not found.used_only_by(t, absorbed)
    ]
    counted = found.maker.get(adam["time_step"])
    if len(apart) < 5 or seen or not found.may_run_late(absorbed, index, written, counted):
        return None
    return {
        "var": var,
        "grad": gradient,
        "scale": scale,
        "first": m["t"],
        "second": v["t"],
        "step": adam["time_step"],
        "minus_lr": minus_lr,
        "beta1": adam["beta1"],
        "beta2": adam["beta2"],
        "epsilon": adam["epsilon"],
        "weight_decay": adam["weight_decay"],
        "absorbed": absorbed,
    }


def _writer(found: Steps, moment: Tensor, name: str, before: int) -> Optional[int]:
    """The step that updated a moment in place just before its only other use."""
    for i in range(before - 1, -1, -1):
        step = found.steps[i]
        if step.definition.name == name and moment in (step.arguments["t"], *step.outputs):
            return i
    return None


def _scaled(found: Steps, gradient: Tensor, users: Any) -> Any:
    """(gradient, scale, absorbed steps): a product with one number is taken into the update."""
    index = found.maker.get(gradient)
    if (
        index is None
        or not found.used_only_by(gradient, users)
        or found.steps[index].definition.name != "mul"
    ):
        return gradient, None, []
    a = found.steps[index].arguments
    if a["rhs"].nelms != 1 or a["lhs"].shape != gradient.shape:
        return gradient, None, []
    constant = scalar_constant(a["rhs"])
    return a["lhs"], a["rhs"] if constant is None else constant, [index]
