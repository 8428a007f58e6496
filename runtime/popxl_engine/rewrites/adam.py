"""AdamW's whole update in one pass over memory."""

from typing import Any, Dict, Optional, Sequence, Tuple

import torch

from popxl_engine import native
from popxl_engine.kernels.compiled import one_pass
from popxl_engine.kernels.rounding import Noise, update_noise, update_part, widened
from popxl_engine.kernels.var_updates import adam_updater, factor
from popxl_engine.rewrites.match import fused

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
