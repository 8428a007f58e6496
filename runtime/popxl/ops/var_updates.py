"""Updates of variables and accumulators in place, and the update that Adam and its relatives apply.

Every update is computed in float32 for 16-bit tensors, and rounded once to the type of the tensor
it changes; with the session option ``enableStochasticRounding`` that rounding is stochastic. The
other operand may be of another width. Factors are numbers or tensors of one element.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from popxl.context import get_current_graph
from popxl.errors import ShapeError
from popxl.opdef import Cost, op
from popxl.ops.arithmetic import add_
from popxl.ops.checks import (
    check_floating,
    check_indices,
    check_numeric,
    check_real,
    check_scalar,
    normalise_axis,
)
from popxl.ops.utils import check_in_graph
from popxl.tensor import Tensor, TensorSpec, make_constant

Scalar = float | Tensor


def _update(name: str, t: Tensor, X: Tensor, **factors: Any) -> TensorSpec:
    check_real(name, t=t, X=X)
    return _updated(name, t, X, **factors)


def _updated(name: str, t: Tensor, X: Tensor, **factors: Any) -> TensorSpec:
    if t.shape != X.shape:
        raise ShapeError(
            f"{name}: got t {t.spec} and X {X.spec}; expected equal shapes. Reshape one of them."
        )
    for parameter, value in factors.items():
        if value is not None:
            check_scalar(name, parameter, value)
    return t.spec


@op(writes=("t",), differentiable=False, names="accumulate__{t}")
def accumulate_(t: Tensor, X: Tensor, f: Scalar | None = None) -> TensorSpec:
    """t += f * X, with f 1 if it is None.

    Shapes: t and X [s], real numbers -> [s].
    Raises:
        ShapeError: if t and X differ in shape, or f has several elements.
        DTypeError: from sessions, if t or X is not real numbers.
    """
    return _update("accumulate_", t, X, f=f)


@op(writes=("t",), differentiable=False, names="accumulate_square__{t}")
def accumulate_square_(t: Tensor, X: Tensor, f: Scalar = 1.0) -> TensorSpec:
    """t += f * X**2.

    Shapes: t and X [s], real numbers -> [s].
    Raises:
        ShapeError: if t and X differ in shape, or f has several elements.
        DTypeError: from sessions, if t or X is not real numbers.
    """
    return _update("accumulate_square_", t, X, f=f)


@op(writes=("t",), differentiable=False, names="accumulate_mean__{t}")
def accumulate_mean_(t: Tensor, X: Tensor, step: Scalar) -> TensorSpec:
    """Running mean: t = t * step / (step + 1) + X / (step + 1).

    Shapes: t and X [s], floating point -> [s].
    Args:
        step: how many values the mean holds already; 0 starts it anew.
    Raises:
        ShapeError: if t and X differ in shape, or step has several elements.
        DTypeError: from sessions, if t is not floating point, or X not real numbers.
    """
    check_floating("accumulate_mean_", t=t)
    return _update("accumulate_mean_", t, X, step=step)


@op(writes=("t",), differentiable=False, names="accumulate_moving_avg__{t}")
def accumulate_moving_average_(t: Tensor, X: Tensor, f: Scalar) -> TensorSpec:
    """Exponential moving average: t = f * t + (1 - f) * X.

    Shapes: t and X [s], floating point -> [s].
    Raises:
        ShapeError: if t and X differ in shape, or f has several elements.
        DTypeError: from sessions, if t is not floating point, or X not real numbers.
    """
    check_floating("accumulate_moving_average_", t=t)
    return _update("accumulate_moving_average_", t, X, f=f)


@op(writes=("t",), differentiable=False, names="accumulate_moving_avg_square__{t}")
def accumulate_moving_average_square_(t: Tensor, X: Tensor, f: Scalar) -> TensorSpec:
    """Exponential moving average of squares: t = f * t + (1 - f) * X**2. X takes the wider type
    before it is squared.

    Shapes: t and X [s], floating point -> [s].
    Raises:
        ShapeError: if t and X differ in shape, or f has several elements.
        DTypeError: from sessions, if t is not floating point, or X not real numbers.
    """
    check_floating("accumulate_moving_average_square_", t=t)
    return _update("accumulate_moving_average_square_", t, X, f=f)


@op(writes=("t",), differentiable=False, names="accumulator_scale__{t}")
def accumulator_scale_(t: Tensor, f: Scalar) -> TensorSpec:
    """Scale an accumulator: t *= f.

    Shapes: t [s], floating point -> [s].
    Raises:
        ShapeError: if f has several elements.
        DTypeError: from sessions, if t is not floating point.
    """
    check_floating("accumulator_scale_", t=t)
    check_scalar("accumulator_scale_", "f", f)
    return t.spec


@op(writes=("t",), differentiable=False, names="accumulator_scale__{t}")
def accumulator_zero_(t: Tensor) -> TensorSpec:
    """t = 0, whatever it held.

    Shapes: t [s], numbers -> [s].
    Raises:
        DTypeError: from sessions, if t is not numbers.
    """
    check_numeric("accumulator_zero_", t=t)
    return t.spec


@op(writes=("t",), differentiable=False, names="sparse_accumulate__{t}")
def sparse_accumulate_(
    t: Tensor,
    X: Tensor,
    indices: Tensor,
    axis: int = 0,
    f: Scalar | None = None,
    W: Tensor | None = None,
) -> TensorSpec:
    """Add slices to where they belong: t[indices] += f * X along an axis, as the gradient of a
    gather needs it.

    Indices that occur several times add up.
    Shapes: t [..., n, ...] with n at axis, indices [i], X as t with i in place of n -> t's shape.
    Args:
        f: 1 if it is None.
        W: the tensor that was gathered from; only its layout would matter, and it is not read.
    Raises:
        ShapeError: if X does not have that shape, or f has several elements.
        DTypeError: from sessions, if indices are not integers.
    """
    check_real("sparse_accumulate_", t=t, X=X)
    axis = normalise_axis("sparse_accumulate_", t, axis)
    check_indices("sparse_accumulate_", "indices", indices)
    expected = (*t.shape[:axis], *indices.shape, *t.shape[axis + 1 :])
    if X.shape != expected:
        raise ShapeError(
            f"sparse_accumulate_: got X {X.spec} for t {t.spec} and indices {indices.spec}; "
            f"expected X of shape {list(expected)}."
        )
    if f is not None:
        check_scalar("sparse_accumulate_", "f", f)
    return t.spec


@op(writes=("t",), differentiable=False, names="updated__{t}")
def copy_var_update_(t: Tensor, X: Tensor) -> TensorSpec:
    """t = X, rounded to t's type.

    Shapes: t and X [s], numbers or of one dtype -> [s].
    Raises:
        ShapeError: if t and X differ in shape.
        DTypeError: from sessions, if they differ in dtype and one is float8 or bool.
    """
    if t.dtype is not X.dtype:
        check_real("copy_var_update_", t=t, X=X)
    return _updated("copy_var_update_", t, X)


for _op, _flops in (
    (accumulate_, 2),
    (accumulate_square_, 3),
    (accumulate_mean_, 3),
    (accumulate_moving_average_, 3),
    (accumulate_moving_average_square_, 4),
    (accumulator_scale_, 1),
    (accumulator_zero_, 0),
    (copy_var_update_, 0),
):
    _op.cost(lambda y, *arguments, _flops=_flops: Cost(flops=_flops * y.nelms))


@sparse_accumulate_.cost
def sparse_accumulate_cost(y: Tensor, t: Tensor, X: Tensor, indices: Tensor, *options: Any) -> Cost:
    """The slices are read, their places read and written; the rest of t is not touched."""
    moved = X.nelms * (X.dtype.itemsize + 2 * t.dtype.itemsize)
    return Cost(flops=2 * X.nelms, bytes=moved + indices.nelms * indices.dtype.itemsize)


# Adam, LAMB and AdaMax


def weight_decay_is_required(weight_decay: None | float | Tensor) -> bool:
    """Whether weight decay does anything: a tensor, or a number that is not zero."""
    return isinstance(weight_decay, Tensor) or bool(weight_decay)


def _moments(
    name: str, first: Tensor, second: Tensor, weight: Tensor | None, **factors: Any
) -> TensorSpec:
    check_floating(
        name,
        acc_first_order=first,
        acc_second_order=second,
        **({} if weight is None else {"weight": weight}),
    )
    for parameter, other in (("acc_second_order", second), ("weight", weight)):
        if other is not None and other.shape != first.shape:
            raise ShapeError(
                f"{name}: got acc_first_order {first.spec} and {parameter} {other.spec}; expected "
                "equal shapes. Make the optimizer's state in the weight's shape."
            )
    for parameter, value in factors.items():
        if value is not None:
            check_scalar(name, parameter, value)
    return TensorSpec(first.shape, (first if weight is None else weight).dtype, first.meta_shape)


@op(name="adam_updater", differentiable=False)
def _adam_updater(
    acc_first_order: Tensor,
    acc_second_order: Tensor,
    weight: Tensor | None,
    time_step: Tensor | None,
    weight_decay: Scalar | None,
    beta1: Scalar | None,
    beta2: Scalar | None,
    epsilon: Scalar,
) -> TensorSpec:
    """`adam_updater` without its write: ``time_step`` is the number of this step, or None for no
    bias correction.
    """
    return _moments(
        "adam_updater",
        acc_first_order,
        acc_second_order,
        weight,
        time_step=time_step,
        weight_decay=weight_decay,
        beta1=beta1,
        beta2=beta2,
        epsilon=epsilon,
    )


@op(name="adamax_updater", differentiable=False)
def _adamax_updater(
    acc_first_order: Tensor,
    acc_second_order: Tensor,
    weight: Tensor | None,
    time_step: Tensor,
    weight_decay: Scalar | None,
    beta1: Scalar,
    epsilon: Scalar,
) -> TensorSpec:
    """`adamax_updater` without its write: ``time_step`` is the number of this step."""
    return _moments(
        "adamax_updater",
        acc_first_order,
        acc_second_order,
        weight,
        time_step=time_step,
        weight_decay=weight_decay,
        beta1=beta1,
        epsilon=epsilon,
    )


_adam_updater.cost(lambda y, *arguments: Cost(flops=8 * y.nelms))
_adamax_updater.cost(lambda y, *arguments: Cost(flops=8 * y.nelms))


def _next_step(time_step: Tensor) -> Tensor:
    """Add one to the step count in place; the new count."""
    check_scalar("adam_updater", "time_step", time_step)
    one = make_constant(np.ones(time_step.shape, time_step.dtype.as_numpy()), time_step.dtype, None)
    return add_(time_step, one)


def _decayed_weight(name: str, weight: Tensor | None, weight_decay: Scalar | None) -> Tensor | None:
    """The weight if it decays, else None. ValueError if it is missing."""
    if not weight_decay_is_required(weight_decay):
        return None
    if weight is None:
        raise ValueError(
            f"{name}: got weight_decay without weight; expected the weight that decays. Pass "
            "weight=."
        )
    return weight


def adam_updater(
    acc_first_order: Tensor,
    acc_second_order: Tensor,
    weight: Tensor | None = None,
    time_step: Tensor | None = None,
    weight_decay: Scalar | None = None,
    beta1: Scalar | None = None,
    beta2: Scalar | None = None,
    epsilon: Scalar = 1e-07,
) -> Tensor:
    """Adam's update, to be subtracted from the weight.

    It is m / (1 - β1**s) / (sqrt(v / (1 - β2**s)) + ε) + weight_decay * weight.

    Shapes: both moments and weight [a], floating point -> [a], weight's dtype if it decays, else
        the first moment's.
    Args:
        time_step: tensor of one element with the number of steps done. One is added to it in place,
            before it is used as s. None: no bias correction, both divisors are 1.
        weight_decay: decoupled from the gradient; None or 0: none.
    Raises:
        ValueError: for weight_decay without weight, or time_step without both betas.
        ShapeError: if the shapes differ, or a factor has several elements.
        DTypeError: from sessions, if a moment or the weight is not floating point.
    Source: Kingma and Ba 2014, arXiv:1412.6980, algorithm 1; Loshchilov and Hutter 2017,
    arXiv:1711.05101, for the decay.
    """
    if time_step is not None:
        _check_betas(beta1, beta2)
        time_step = _next_step(time_step)
    return adam_updater_at(
        acc_first_order, acc_second_order, weight, time_step, weight_decay, beta1, beta2, epsilon
    )


def adam_updater_at(
    acc_first_order: Tensor,
    acc_second_order: Tensor,
    weight: Tensor | None = None,
    step: Tensor | None = None,
    weight_decay: Scalar | None = None,
    beta1: Scalar | None = None,
    beta2: Scalar | None = None,
    epsilon: Scalar = 1e-07,
) -> Tensor:
    """`adam_updater` of a step that is counted already: it writes nothing. Programs call it by
    `popxl.extensions`.

    Shapes, other arguments and errors: as for `adam_updater`.
    Args:
        step: tensor of one element with the number of this step, counted from 1. None: no bias
            correction.
    """
    decayed = _decayed_weight("adam_updater", weight, weight_decay)
    if step is not None:
        _check_betas(beta1, beta2)
    decay = weight_decay if decayed is not None else None
    betas = (None, None) if step is None else (beta1, beta2)
    return _adam_updater(acc_first_order, acc_second_order, decayed, step, decay, *betas, epsilon)


def _check_betas(beta1: Scalar | None, beta2: Scalar | None) -> None:
    """ValueError if a bias correction lacks one."""
    if beta1 is None or beta2 is None:
        raise ValueError(
            "adam_updater: got time_step without both betas; expected beta1 and beta2 for "
            "the bias correction."
        )


def lamb_updater(
    acc_first_order: Tensor,
    acc_second_order: Tensor,
    weight: Tensor | None = None,
    time_step: Tensor | None = None,
    weight_decay: Scalar | None = None,
    beta1: Scalar | None = None,
    beta2: Scalar | None = None,
    epsilon: Scalar = 1e-07,
) -> Tensor:
    """LAMB's update before its trust ratio, which `adam_var_update` applies: the same as
    `adam_updater`.

    Shapes, arguments and errors: as for `adam_updater`.
    Raises:
        ValueError: for weight_decay without weight, or time_step without both betas.
    Source: You et al. 2019, arXiv:1904.00962, algorithm 2.
    """
    return adam_updater(
        acc_first_order, acc_second_order, weight, time_step, weight_decay, beta1, beta2, epsilon
    )


def adamax_updater(
    acc_first_order: Tensor,
    acc_second_order: Tensor,
    weight: Tensor | None = None,
    time_step: Tensor | None = None,
    weight_decay: Scalar | None = None,
    beta1: Scalar = 0.9,
    epsilon: Scalar = 1e-07,
) -> Tensor:
    """AdaMax's update: m / (1 - β1**s) / (v + ε) + weight_decay * weight, where v is a decayed
    maximum.

    Shapes, arguments and errors: as for `adam_updater`, but time_step is needed.
    Raises:
        ValueError: for weight_decay without weight, or without time_step.
    Source: Kingma and Ba 2014, arXiv:1412.6980, algorithm 2.
    """
    decayed = _decayed_weight("adamax_updater", weight, weight_decay)
    if time_step is None:
        raise ValueError(
            "adamax_updater: got no time_step; expected a tensor of one element that counts "
            "the steps."
        )
    decay = weight_decay if decayed is not None else None
    step = _next_step(time_step)
    return _adamax_updater(acc_first_order, acc_second_order, decayed, step, decay, beta1, epsilon)


def create_adamupdater(
    acc_first_order: Tensor,
    acc_second_order: Tensor,
    ins: Mapping[int, Tensor],
    mode: str,
    weight: Tensor | None = None,
    time_step: Tensor | None = None,
    weight_decay: Scalar | None = None,
    beta1: Scalar | None = None,
    beta2: Scalar | None = None,
    epsilon: Scalar = 1e-07,
) -> Tensor:
    """The update of a mode: "adam", "lamb" or "adamax".

    Shapes, arguments and errors: as for `adam_updater`.
    Args:
        ins: tensors that must be of the current graph; the operands are those given by name.
        mode: also an enumeration member of that name.
    Raises:
        ValueError: for another mode, a tensor of another graph, and what the mode's function
            refuses.
    """
    check_in_graph(get_current_graph(), **{f"ins[{i}]": t for i, t in ins.items()})
    kind = str(getattr(mode, "name", mode)).lower()
    if kind not in ("adam", "lamb", "adamax"):
        raise ValueError(
            f"create_adamupdater: got mode {mode!r}; expected 'adam', 'lamb' or 'adamax'."
        )
    if kind == "adamax":
        first = 0.9 if beta1 is None else beta1
        return adamax_updater(
            acc_first_order, acc_second_order, weight, time_step, weight_decay, first, epsilon
        )
    return adam_updater(
        acc_first_order, acc_second_order, weight, time_step, weight_decay, beta1, beta2, epsilon
    )


@op(writes=("t",), differentiable=False, names="updated__{t}")
def adam_var_update(
    t: Tensor,
    x: Tensor,
    r1: Tensor,
    r2: Tensor,
    learning_rate: Scalar | None = None,
    max_weight_norm: Scalar | None = None,
) -> TensorSpec:
    """Apply an update in place, scaled by LAMB's trust ratio: t -= learning_rate * ratio * x.

    ratio = min(sqrt(r1), max_weight_norm) / sqrt(r2), or 1 where r1, r2 or max_weight_norm is zero.
    Shapes: t and x [s], floating point; r1 and r2 tensors of one element: the squared norms of t
    and x, as of `lamb_square` -> [s].
    Args:
        learning_rate: 1 if it is None.
        max_weight_norm: no limit if it is None.
    Raises:
        ShapeError: if t and x differ in shape, or another operand has several elements.
    Source: You et al. 2019, arXiv:1904.00962, algorithm 2.
    """
    check_floating("adam_var_update", t=t, x=x)
    return _update(
        "adam_var_update",
        t,
        x,
        r1=r1,
        r2=r2,
        learning_rate=learning_rate,
        max_weight_norm=max_weight_norm,
    )


adam_var_update.cost(lambda y, *arguments: Cost(flops=3 * y.nelms))
