"""Updates in place. 16-bit tensors are updated in float32 and rounded once, by
`rounding.update`.
"""

from typing import Any

import torch

from popxl_engine.kernels.arithmetic import sum_of_integers
from popxl_engine.kernels.registry import kernel
from popxl_engine.kernels.rounding import TORCH_HALF_DTYPES, as_float32, update

Scalar = float | torch.Tensor


def is_plain(t: torch.Tensor) -> bool:
    """Whether torch's own in-place arithmetic gives the right result: floating point that is not 16
    bits wide.
    """
    return t.is_floating_point() and t.dtype not in TORCH_HALF_DTYPES


def working(t: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``t`` in the type in which ``like`` is updated: its own, float32 for 16 bits; for integers
    int64, or float64 where ``t`` has fractions.
    """
    if not like.is_floating_point():
        return t.to(torch.float64 if t.is_floating_point() else torch.int64)
    return t.to(torch.float32 if like.dtype in TORCH_HALF_DTYPES else like.dtype)


def factor(value: Scalar | None) -> Any:
    """A number, or a tensor without axes, which takes the type of what it multiplies."""
    return value.reshape(()) if isinstance(value, torch.Tensor) else value


def add_scaled(t: torch.Tensor, value: torch.Tensor, f: Scalar | None) -> torch.Tensor:
    """t += f * value; value is in t's working type."""
    if not t.is_floating_point():
        return update(t, sum_of_integers(t, value, 1, 1 if f is None else f))
    if not is_plain(t):
        return update(t, working(t, t) + (value if f is None else value * factor(f)))
    if isinstance(f, torch.Tensor):
        return t.addcmul_(value, factor(f).to(t.dtype))
    return t.add_(value, alpha=1 if f is None else f)


@kernel("accumulate_")
def accumulate_(t: torch.Tensor, X: torch.Tensor, f: Scalar | None) -> torch.Tensor:
    """t += f * X."""
    return add_scaled(t, working(X, t), f)


@kernel("accumulate_square_")
def accumulate_square_(t: torch.Tensor, X: torch.Tensor, f: Scalar) -> torch.Tensor:
    """t += f * X**2."""
    if is_plain(t) and not isinstance(f, torch.Tensor):
        wide = working(X, t)
        return t.addcmul_(wide, wide, value=f)
    return add_scaled(t, working(X, t).square(), f)


def mean_factors(step: Any) -> tuple[float, float]:
    """The weights of the old mean and of the new value, for a count of values already in the
    mean.
    """
    count = float(step)
    return count / (count + 1), 1 / (count + 1)


@kernel("accumulate_mean_")
def accumulate_mean_(t: torch.Tensor, X: torch.Tensor, step: Scalar) -> torch.Tensor:
    """t = t * step / (step + 1) + X / (step + 1); with step 0, what was there may be infinite or
    NaN.
    """
    step, value = factor(step), working(X, t)
    if isinstance(step, torch.Tensor):
        step = step.to(torch.float64)
        torch.where(step == 0, value.to(t.dtype), t, out=t)
    elif step == 0:
        return update(t, value)
    new = 1 / (step + 1)
    return mix(t, value, step * new, new)


def mix(t: torch.Tensor, value: torch.Tensor, old: Scalar, new: Scalar) -> torch.Tensor:
    """t = old * t + new * value, where old + new is 1; value is in t's working type, and may be
    ``t`` itself.
    """
    if not is_plain(t):
        return update(t, working(t, t) * old + value * new)
    return t.lerp_(value, new.to(t.dtype) if isinstance(new, torch.Tensor) else new)


@kernel("accumulate_moving_average_")
def accumulate_moving_average_(t: torch.Tensor, X: torch.Tensor, f: Scalar) -> torch.Tensor:
    """t = f * t + (1 - f) * X."""
    f = factor(f)
    return mix(t, working(X, t), f, 1 - f)


@kernel("accumulate_moving_average_square_")
def accumulate_moving_average_square_(t: torch.Tensor, X: torch.Tensor, f: Scalar) -> torch.Tensor:
    """t = f * t + (1 - f) * X**2."""
    f = factor(f)
    return mix(t, working(X, t).square(), f, 1 - f)


@kernel("accumulator_scale_")
def accumulator_scale_(t: torch.Tensor, f: Scalar) -> torch.Tensor:
    """t *= f."""
    return t.mul_(factor(f)) if is_plain(t) else update(t, working(t, t) * factor(f))


@kernel("accumulator_zero_")
def accumulator_zero_(t: torch.Tensor) -> torch.Tensor:
    """t = 0."""
    return t.zero_()


@kernel("sparse_accumulate_")
def sparse_accumulate_(
    t: torch.Tensor,
    X: torch.Tensor,
    indices: torch.Tensor,
    axis: int,
    f: Scalar | None,
    W: torch.Tensor | None,
) -> torch.Tensor:
    """t[indices] += f * X along an axis; indices outside stand for the nearest one inside."""
    axis %= t.dim()
    flat = indices.reshape(-1).to(torch.int64).clamp(0, t.shape[axis] - 1)
    X = working(X, t).reshape([*t.shape[:axis], flat.numel(), *t.shape[axis + 1 :]])
    if is_plain(t) and not isinstance(f, torch.Tensor):
        return t.index_add_(axis, flat, X, alpha=1 if f is None else f)
    if not t.is_floating_point():
        sums = torch.zeros(t.shape, dtype=X.dtype, device=t.device)
        return add_scaled(t, sums.index_add_(axis, flat, X), f)
    X = X if f is None else X * factor(f)
    return update(t, working(t, t).index_add(axis, flat, X))


@kernel("copy_var_update_")
def copy_var_update_(t: torch.Tensor, X: torch.Tensor) -> torch.Tensor:
    """t = X."""
    return update(t, X)


def correction(beta: Scalar | None, step: torch.Tensor) -> torch.Tensor:
    """1 - beta**step in float64: in float32 the first steps would lose four digits."""
    power = step.reshape(()).to(torch.float64)
    base = factor(beta)
    return 1 - torch.pow(base.to(torch.float64) if isinstance(base, torch.Tensor) else base, power)


def with_decay(
    u: torch.Tensor, weight: torch.Tensor | None, weight_decay: Scalar | None
) -> torch.Tensor:
    """u + weight_decay * weight, in weight's type."""
    if weight is None or weight_decay is None:
        return u
    wide = weight.to(u.dtype)
    if isinstance(weight_decay, torch.Tensor):
        u.addcmul_(wide, factor(weight_decay).to(u.dtype))
    else:
        u.add_(wide, alpha=weight_decay)
    return u.to(weight.dtype)


@kernel("adam_updater")
def adam_updater(
    acc_first_order: torch.Tensor,
    acc_second_order: torch.Tensor,
    weight: torch.Tensor | None,
    time_step: torch.Tensor | None,
    weight_decay: Scalar | None,
    beta1: Scalar | None,
    beta2: Scalar | None,
    epsilon: Scalar,
) -> torch.Tensor:
    """m / (1 - b1**s) / (sqrt(v / (1 - b2**s)) + eps) + weight_decay * weight."""
    m, v = as_float32(acc_first_order), as_float32(acc_second_order)
    if time_step is None:
        u = m / v.sqrt().add_(factor(epsilon))
    else:
        denominator = (v / correction(beta2, time_step)).sqrt_().add_(factor(epsilon))
        u = (m / correction(beta1, time_step)).div_(denominator)
    result = with_decay(u, weight, weight_decay)
    return result if weight is not None else result.to(acc_first_order.dtype)


@kernel("adamax_updater")
def adamax_updater(
    acc_first_order: torch.Tensor,
    acc_second_order: torch.Tensor,
    weight: torch.Tensor | None,
    time_step: torch.Tensor,
    weight_decay: Scalar | None,
    beta1: Scalar,
    epsilon: Scalar,
) -> torch.Tensor:
    """m / (1 - b1**s) / (v + eps) + weight_decay * weight."""
    m, v = as_float32(acc_first_order), as_float32(acc_second_order)
    u = (m / correction(beta1, time_step)).div_(v + factor(epsilon))
    result = with_decay(u, weight, weight_decay)
    return result if weight is not None else result.to(acc_first_order.dtype)


@kernel("adam_var_update")
def adam_var_update(
    t: torch.Tensor,
    x: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    learning_rate: Scalar | None,
    max_weight_norm: Scalar | None,
) -> torch.Tensor:
    """t -= learning_rate * ratio * x."""
    weight_norm, update_norm = (as_float32(r).reshape(()).sqrt() for r in (r1, r2))
    usable = (weight_norm != 0) & (update_norm != 0)
    if max_weight_norm is not None:
        limit = factor(max_weight_norm)
        is_tensor = isinstance(limit, torch.Tensor)
        limit = limit.to(weight_norm.dtype) if is_tensor else weight_norm.new_full((), limit)
        usable &= limit != 0
        weight_norm = torch.minimum(weight_norm, limit)
    ratio = torch.where(usable, weight_norm / update_norm, torch.ones_like(update_norm))
    return add_scaled(
        t, working(x, t), -ratio if learning_rate is None else -ratio * factor(learning_rate)
    )
