"""AdamW's whole update in one pass over memory."""

from typing import Any, Dict, List, Optional

import torch
from popxl.graph import Graph
from popxl.values import Tensor

from popxl_engine import native
from popxl_engine.kernels.rounding import Updates, update_noise, update_part
from popxl_engine.kernels.var_updates import correction
from popxl_engine.rewrites.match import Steps, fused, scalar_constant
from popxl_engine.steps import Step

CHUNK = 1 << 17
"""Elements worked on at a time by each thread: a scaled gradient is still in the cache when the update reads it."""


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
    """One AdamW step with gradient ``grad * scale``; ``step`` is counted already. Writes var, first and second."""
    options: Dict[str, Any] = {
        "lr": -float(minus_lr), "beta1": float(beta1), "beta2": float(beta2), "eps": float(epsilon),
        "weight_decay": float(weight_decay or 0.0), "amsgrad": False, "maximize": False,
    }  # fmt: skip
    factor = 1.0 if scale is None else float(scale)
    if not (var.is_contiguous() and first.is_contiguous() and second.is_contiguous()):
        return _strided(var, grad, scale, first, second, step, minus_lr, beta1, beta2, epsilon, weight_decay)
    if native.takes(var, grad, first, second) and first.dtype == second.dtype == torch.float32:
        return _native(var, grad, factor, first, second, step, options)
    flat = [t.view(-1) for t in (var, first, second)]
    gradient = grad.reshape(-1)
    steps, noise, size = [step.reshape(())], update_noise(var), CHUNK * torch.get_num_threads()
    for start in range(0, var.numel(), size):
        weight, m, v = (t[start : start + size] for t in flat)
        g = gradient[start : start + size].to(torch.float32)
        if factor != 1.0:
            g = g * factor
        wide = weight.to(torch.float32)
        torch._fused_adamw_([wide], [g], [m], [v], [], steps, **options)
        if wide is not weight:
            update_part(weight, wide, noise, start)
    return var


def _native(
    var: torch.Tensor,
    grad: torch.Tensor,
    scale: float,
    first: torch.Tensor,
    second: torch.Tensor,
    step: torch.Tensor,
    options: Dict[str, Any],
) -> torch.Tensor:
    """`adamw_` in one pass over memory."""
    lr, beta1, beta2 = options["lr"], options["beta1"], options["beta2"]
    noise = update_noise(var)
    base, shifts = (None, None) if noise is None else noise.parts(var.numel(), Updates.offset)
    numbers = (
        scale, beta1, beta2, 1 - lr * options["weight_decay"],
        float(lr / correction(beta1, step)), float(correction(beta2, step).sqrt()), options["eps"],
    )  # fmt: skip
    operands = (var, grad, first, second, base, shifts)
    native.call("adamw", (var.dtype, grad.dtype), *operands, Updates.offset, *numbers, var.numel())
    return var


def _strided(
    var: torch.Tensor, grad: torch.Tensor, scale: Any, first: torch.Tensor, second: torch.Tensor, *rest: Any
) -> torch.Tensor:
    """`adamw_` on copies of what does not lie in memory in order."""
    copies = [t.contiguous() for t in (var, first, second)]
    adamw_(copies[0], grad, scale, copies[1], copies[2], *rest)
    for t, copy in zip((var, first, second), copies):
        t.copy_(copy)
    return var


ADAMW = fused(adamw_, writes=("var", "first", "second"))


def fuse_adam(steps: List[Step], graph: Graph) -> List[Step]:
    """Both moments, Adam's update and its subtraction from the weight, as `AdamOptimizerStep` builds them."""
    found = Steps(steps, graph)
    for i, step in enumerate(steps):
        if step.definition.name == "scaled_add_" and (match := _match(found, i)) is not None:
            absorbed = match.pop("absorbed")
            found.replace(i, Step(ADAMW, match, step.outputs, step.source), *absorbed)
    return found.result()


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
    plain = m["t"].dtype.name == v["t"].dtype.name == "float32" and adam["weight"] in (None, var)
    if not same or not plain:
        return None
    gradient, scale, absorbed = _scaled(found, m["X"], (first, second))
    absorbed = [first, second, made, *absorbed]
    written = (var, m["t"], v["t"])
    apart = {found.origin(t) for t in (*written, gradient, adam["time_step"])}
    seen = [t for i in (first, second) for t in found.steps[i].outputs if not found.used_only_by(t, absorbed)]
    counted = found.maker.get(adam["time_step"])
    if len(apart) < 5 or seen or not found.may_run_late(absorbed, index, written, counted):
        return None
    return {
        "var": var, "grad": gradient, "scale": scale, "first": m["t"], "second": v["t"], "step": adam["time_step"],
        "minus_lr": minus_lr, "beta1": adam["beta1"], "beta2": adam["beta2"], "epsilon": adam["epsilon"],
        "weight_decay": adam["weight_decay"], "absorbed": absorbed,
    }  # fmt: skip


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
    if index is None or not found.used_only_by(gradient, users) or found.steps[index].definition.name != "mul":
        return gradient, None, []
    a = found.steps[index].arguments
    if a["rhs"].nelms != 1 or a["lhs"].shape != gradient.shape:
        return gradient, None, []
    constant = scalar_constant(a["rhs"])
    return a["lhs"], a["rhs"] if constant is None else constant, [index]
