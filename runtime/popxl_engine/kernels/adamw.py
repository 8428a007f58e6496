"""AdamW's whole update in one pass over memory."""

from collections.abc import Sequence
from typing import Any

import torch

from popxl_engine.kernels.compiled import one_pass
from popxl_engine.kernels.registry import kernel
from popxl_engine.kernels.rounding import (
    TORCH_HALF_DTYPES,
    Noise,
    as_float32,
    rounded_at,
    update_noise,
    update_part,
)
from popxl_engine.kernels.var_updates import adam_updater, factor
from popxl_engine.native import library as native
from popxl_engine.ops.adamw import STATE, AdamW

Options = dict[str, Any]
Noises = Sequence[Noise | None]

CHUNK = 1 << 17
"""Elements worked on at a time by each thread: a scaled gradient is still in the cache when the
update reads it.
"""


@kernel("fused_adamw_")
def adamw_(*operands: Any) -> torch.Tensor:
    """One step of `AdamW`'s operands; writes var, first and second.

    Those of 16 bits are rounded once each, and draw in this order. The update is made from the
    moments as rounded.
    """
    return _update(AdamW(*operands))


@kernel("fused_adamw_where_")
def adamw_where_(condition: torch.Tensor, *operands: Any) -> torch.Tensor:
    """`adamw_` where a bool scalar is true; no bit of var, first and second changes where it is
    false.
    """
    of = AdamW(*operands)
    if of.var.is_cuda:  # nobody waits for a GPU's
        return _update(of, condition)
    return _update(of) if bool(condition) else of.var


def _update(of: AdamW, condition: torch.Tensor | None = None) -> torch.Tensor:
    """One step, where a GPU's condition is true."""
    var, state = of.var, (of.var, of.first, of.second)
    in_one_pass = native.updates(*state, of.grad)
    if not in_one_pass and not all(t.is_contiguous() for t in state):
        return _strided(of, condition)
    as_factor = factor if var.is_cuda else float  # nobody waits for a GPU's
    times, noises = (
        1.0 if of.scale is None else as_factor(of.scale),
        [update_noise(t) for t in state],
    )
    lr, numbers = (
        -as_factor(of.minus_lr),
        tuple(map(float, (of.beta1, of.beta2, of.epsilon, of.weight_decay or 0.0))),
    )
    starts = {noise.start for noise in noises if noise is not None}
    if in_one_pass and len(starts) <= 1:
        return _native(state, of.grad, (times, float(of.step), lr, *numbers), noises, *starts)
    if len(starts) <= 1 and _is_done_at_once(of, lr, numbers, noises, condition):
        return var
    options: Options = dict(zip(("lr", "beta1", "beta2", "eps", "weight_decay"), (lr, *numbers)))
    update = (
        _fused
        if of.first.dtype == of.second.dtype == torch.float32 and not var.is_cuda
        else _step_by_step
    )
    flat, gradient, step = [t.view(-1) for t in state], of.grad.reshape(-1), of.step.reshape(())
    size = max(var.numel(), 1) if var.is_cuda else CHUNK * torch.get_num_threads()
    is_one = isinstance(times, float) and times == 1.0
    for start in range(0, var.numel(), size):
        # torch's own update takes a gradient with gaps for one without
        g = gradient[start : start + size].to(torch.float32).contiguous()
        part = [t[start : start + size] for t in flat]
        update(part, g if is_one else g * times, step, options, noises, start, condition)
    return var


def _is_done_at_once(
    of: AdamW, lr: Any, numbers: Sequence[float], noises: Noises, condition: torch.Tensor | None
) -> bool:
    """Whether what is compiled for a GPU has done the step. A compiler keeps moments that are
    rounded to nearest in float32 until they are stored, and the weight's step is made of rounded
    ones.
    """
    keeps_wide = any(
        noise is None and t.dtype in TORCH_HALF_DTYPES
        for t, noise in zip((of.first, of.second), noises[1:])
    )
    if keeps_wide or not _step_at_once.is_for(of.var):
        return False
    weight, *pair = (t.view(-1) for t in (of.var, of.first, of.second))
    scale = None if of.scale is None else factor(of.scale)
    keys = [None if noise is None else noise.key_there for noise in noises]
    start = next((noise.start for noise in noises if noise is not None), 0)
    operands = (of.grad.reshape(-1), scale, of.step.reshape(()), (lr, *numbers), keys, start)
    return _step_at_once.attempt(weight, pair, *operands, condition)[0]


def _strided(of: AdamW, condition: torch.Tensor | None) -> torch.Tensor:
    """`_update` on copies of what does not lie in memory in order."""
    state = {name: getattr(of, name) for name in STATE}
    copies = {name: t.contiguous() for name, t in state.items()}
    _update(of._replace(**copies), condition)
    for name, t in state.items():
        t.copy_(copies[name])
    return of.var


def _fused(
    state: Sequence[torch.Tensor],
    g: torch.Tensor,
    step: torch.Tensor,
    options: Options,
    noises: Noises,
    start: int,
    condition: torch.Tensor | None = None,
) -> None:
    """`adamw_` on a part whose first element has index ``start``, with moments in float32; there is
    no condition.
    """
    assert condition is None, "a processor's is asked before"
    weight, m, v = state
    wide = as_float32(weight)
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
    condition: torch.Tensor | None = None,
) -> None:
    """The same with moments of any type, and on any device."""
    weight, m, v = state
    beta1, beta2 = options["beta1"], options["beta2"]
    first, second = moments(g, m, v, beta1, beta2)
    update_part(m, first, noises[1], start, condition)
    update_part(v, second, noises[2], start, condition)
    rest = (options["lr"], beta1, beta2, options["eps"], options["weight_decay"])
    update_part(weight, updated_weight(weight, m, v, step, *rest), noises[0], start, condition)


@one_pass
def _step_at_once(
    weight: torch.Tensor,
    pair: Sequence[torch.Tensor],
    grad: torch.Tensor,
    scale: Any,
    step: torch.Tensor,
    numbers: Sequence[Any],
    keys: Sequence[torch.Tensor | None],
    start: int,
    condition: torch.Tensor | None,
) -> None:
    """The same in one pass over memory, for compilers.

    Args:
        pair: both moments.
        numbers: rate, beta1, beta2, epsilon and decay.
        keys: of the noises of weight and moments.
        start: of each noise.
    """
    (m, v), (lr, beta1, beta2, epsilon, decay) = pair, numbers
    g = grad.to(torch.float32) if scale is None else grad.to(torch.float32) * scale
    places = torch.arange(weight.numel(), dtype=torch.int64, device=weight.device) + start
    first, second = _moments(g, m, v, beta1, beta2)
    first = rounded_at(m.dtype, first, keys[1], places)
    second = rounded_at(v.dtype, second, keys[2], places)
    u = _updated_weight(weight, first, second, step, lr, beta1, beta2, epsilon, decay)
    for t, new in ((m, first), (v, second), (weight, rounded_at(weight.dtype, u, keys[0], places))):
        t.copy_(new if condition is None else torch.where(condition, new, t))


def _moments(
    g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, beta1: float, beta2: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both moments with a gradient in them, float32."""
    return as_float32(m) * beta1 + g * (1 - beta1), as_float32(v) * beta2 + g.square() * (1 - beta2)


def _updated_weight(
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
    u = adam_updater(as_float32(m), as_float32(v), None, step, None, beta1, beta2, epsilon)
    return as_float32(weight) * (1 - lr * decay) - lr * u


moments, updated_weight = one_pass(_moments), one_pass(_updated_weight)


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
