"""AdamW's whole update in one pass over memory."""

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from popxl.graph import Graph
from popxl.opdef import flatten
from popxl.values import Tensor

from popxl_engine import native
from popxl_engine.kernels.compiled import one_pass
from popxl_engine.kernels.rounding import Noise, update_noise, update_part, widened
from popxl_engine.kernels.var_updates import adam_updater, factor
from popxl_engine.rewrites.match import Steps, fused, scalar_constant, writes
from popxl_engine.steps import Step

Options = Dict[str, Any]

MOMENTS = {"float32", "float16", "bfloat16"}
"""Element types that moments may have."""
CHUNK = 1 << 17
"""Elements worked on at a time by each thread: a scaled gradient is still in the cache when the
update reads it.
"""


def adamw_(
    var: torch.Tensor,
    grad: torch.Tensor,
    scale: Any,
    first: torch.Tensor,
    second: torch.Tensor,
    step: torch.Tensor,
    minus_lr: Any,
    beta1: Any,
    beta2: Any,
    epsilon: Any,
    weight_decay: Any,
) -> torch.Tensor:
    """One AdamW step with gradient ``grad * scale``; ``step`` is counted already. Writes var, first
    and second.

    Those of 16 bits are rounded once each, and draw in this order. The update is made from the
    moments as rounded.
    """
    return _adamw(
        None, var, grad, scale, first, second, step, minus_lr, beta1, beta2, epsilon, weight_decay
    )


def adamw_where_(
    condition: torch.Tensor,
    var: torch.Tensor,
    grad: torch.Tensor,
    scale: Any,
    first: torch.Tensor,
    second: torch.Tensor,
    step: torch.Tensor,
    minus_lr: Any,
    beta1: Any,
    beta2: Any,
    epsilon: Any,
    weight_decay: Any,
) -> torch.Tensor:
    """`adamw_` where a bool scalar is true; no bit of var, first and second changes where it is
    false.
    """
    if not var.is_cuda and not bool(condition):
        return var
    asked = condition if var.is_cuda else None  # nobody waits for a GPU's
    return _adamw(
        asked, var, grad, scale, first, second, step, minus_lr, beta1, beta2, epsilon, weight_decay
    )


def _adamw(
    condition: Optional[torch.Tensor],
    var: torch.Tensor,
    grad: torch.Tensor,
    scale: Any,
    first: torch.Tensor,
    second: torch.Tensor,
    step: torch.Tensor,
    minus_lr: Any,
    beta1: Any,
    beta2: Any,
    epsilon: Any,
    weight_decay: Any,
) -> torch.Tensor:
    state = (var, first, second)
    in_one_pass = native.updates(*state, grad)
    if not in_one_pass and not all(t.is_contiguous() for t in state):
        rest = (step, minus_lr, beta1, beta2, epsilon, weight_decay)
        return _strided(condition, var, grad, scale, first, second, *rest)
    number = factor if var.is_cuda else float  # nobody waits for a GPU's
    times, noises = 1.0 if scale is None else number(scale), [update_noise(t) for t in state]
    lr, numbers = (
        -number(minus_lr),
        (float(beta1), float(beta2), float(epsilon), float(weight_decay or 0.0)),
    )
    starts = {noise.start for noise in noises if noise is not None}
    if in_one_pass and len(starts) <= 1:
        return _native(state, grad, (times, float(step), lr, *numbers), noises, *starts)
    options: Options = dict(zip(("lr", "beta1", "beta2", "eps", "weight_decay"), (lr, *numbers)))
    update = (
        _fused
        if first.dtype == second.dtype == torch.float32 and not var.is_cuda
        else _step_by_step
    )
    flat, gradient = [t.view(-1) for t in state], grad.reshape(-1)
    size = max(var.numel(), 1) if var.is_cuda else CHUNK * torch.get_num_threads()
    is_one = isinstance(times, float) and times == 1.0
    for start in range(0, var.numel(), size):
        g = gradient[start : start + size].to(torch.float32)
        part = [t[start : start + size] for t in flat]
        update(
            part, g if is_one else g * times, step.reshape(()), options, noises, start, condition
        )
    return var


Noises = Sequence[Optional[Noise]]


def _fused(
    state: Sequence[torch.Tensor],
    g: torch.Tensor,
    step: torch.Tensor,
    options: Options,
    noises: Noises,
    start: int,
    condition: Optional[torch.Tensor] = None,
) -> None:
    """`adamw_` on a part whose first element has index ``start``, with moments in float32; there is
    no condition.
    """
    assert condition is None, "a processor's is asked before"
    weight, m, v = state
    wide = widened(weight)
    torch._fused_adamw_([wide], [g], [m], [v], [], [step], **options, amsgrad=False, maximize=False)
    if wide is not weight:
        update_part(weight, wide, noises[0], start)


def _step_by_step(
    state: Sequence[torch.Tensor],
    g: torch.Tensor,
    step: torch.Tensor,
    options: Options,
    noises: Noises,
    start: int,
    condition: Optional[torch.Tensor] = None,
) -> None:
    """The same with moments of any type, and on any device."""
    weight, m, v = state
    beta1, beta2 = options["beta1"], options["beta2"]
    first, second = _moments(g, m, v, beta1, beta2)
    update_part(m, first, noises[1], start, condition)
    update_part(v, second, noises[2], start, condition)
    rest = (options["lr"], beta1, beta2, options["eps"], options["weight_decay"])
    update_part(weight, _weight(weight, m, v, step, *rest), noises[0], start, condition)


@one_pass
def _moments(
    g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, beta1: float, beta2: float
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Both moments with a gradient in them, float32."""
    return widened(m) * beta1 + g * (1 - beta1), widened(v) * beta2 + g.square() * (1 - beta2)


@one_pass
def _weight(
    weight: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    step: torch.Tensor,
    lr: Any,
    beta1: float,
    beta2: float,
    epsilon: float,
    decay: float,
) -> torch.Tensor:
    """The weight after its step, float32."""
    u = adam_updater(widened(m), widened(v), None, step, None, beta1, beta2, epsilon)
    return widened(weight) * (1 - lr * decay) - lr * u


def _native(
    state: Sequence[torch.Tensor],
    grad: torch.Tensor,
    numbers: Sequence[float],
    noises: Noises,
    offset: int = 0,
) -> torch.Tensor:
    """`adamw_` in one pass over memory. ``offset``: the start of every noise."""
    keys = [0 if noise is None else noise.key for noise in noises]
    operands = [argument for t in (*state, grad) for argument in (t, native.CODES[t.dtype])]
    native.call("adamw", (), *operands, *keys, offset, *numbers, grad.numel())
    return state[0]


def _strided(
    condition: Optional[torch.Tensor],
    var: torch.Tensor,
    grad: torch.Tensor,
    scale: Any,
    first: torch.Tensor,
    second: torch.Tensor,
    *rest: Any,
) -> torch.Tensor:
    """`_adamw` on copies of what does not lie in memory in order."""
    copies = [t.contiguous() for t in (var, first, second)]
    _adamw(condition, copies[0], grad, scale, copies[1], copies[2], *rest)
    for t, copy in zip((var, first, second), copies):
        t.copy_(copy)
    return var


ADAMW = fused(adamw_, writes=("var", "first", "second"))
ADAMW_WHERE = fused(adamw_where_, writes=("var", "first", "second"))


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
                found.replace(
                    i,
                    Step(
                        ADAMW_WHERE,
                        {"condition": condition, **match},
                        step.outputs,
                        step.source,
                        writers,
                    ),
                )
            else:
                found.replace(i, Step(ADAMW, match, step.outputs, step.source, writers))
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
    plain = {m["t"].dtype.name, v["t"].dtype.name} <= MOMENTS and adam["weight"] in (None, var)
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
