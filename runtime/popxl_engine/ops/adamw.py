"""AdamW's whole update, and the same under a condition."""

import inspect
from typing import Any, NamedTuple

from popxl.op_records import Cost
from popxl.tensor import TensorSpec

from popxl_engine.ops.definition import check, flops_of, fused_op

STATE = ("var", "first", "second")
"""Operands that an update writes, all of one shape."""
TYPES = ("float32", "float16", "bfloat16")
"""Element types that a weight and its moments may have."""


class AdamW(NamedTuple):
    """What an update takes: specs in rules, torch tensors in kernels. Factors may be numbers.

    Shapes: var, grad, first and second [a]; step and factors of one element.
    """

    var: Any
    grad: Any
    scale: Any
    """What the gradient is multiplied with; None: nothing."""
    first: Any
    second: Any
    step: Any
    """The number of this update, counted already."""
    minus_lr: Any
    beta1: Any
    beta2: Any
    epsilon: Any
    weight_decay: Any


OPERANDS = inspect.signature(AdamW)
CONDITION = inspect.Parameter("condition", inspect.Parameter.POSITIONAL_OR_KEYWORD)


def adamw_cost(y: TensorSpec, *operands: Any) -> Cost:
    """The gradient's scaling, both moments, the update, and its subtraction."""
    var, _, scale, first, second, *_ = operands
    flops = flops_of("accumulate_moving_average_", first)
    flops += flops_of("accumulate_moving_average_square_", second)
    flops += flops_of("adam_updater", first) + flops_of("scaled_add_", var, var, var, 1.0, -1.0)
    return Cost(flops=flops + (0 if scale is None else flops_of("mul", first)))


@fused_op(cost=adamw_cost, writes=STATE, signature=OPERANDS)
def adamw_(**operands: Any) -> TensorSpec:
    """One AdamW step with gradient ``grad * scale``; writes var, first and second. See `AdamW`.

    Those of 16 bits are rounded once each, and draw in this order. The update is made from the
    moments as rounded.
    """
    return _infer("adamw_", AdamW(**operands))


def adamw_where_cost(y: TensorSpec, condition: TensorSpec, *operands: Any) -> Cost:
    """The update, and a choice per element of what it writes."""
    of = AdamW(*operands)
    chosen = (flops_of("where", t, condition, t, t) for t in (of.var, of.first, of.second))
    return Cost(flops=adamw_cost(y, *operands).flops + sum(chosen))


@fused_op(
    cost=adamw_where_cost,
    writes=STATE,
    signature=OPERANDS.replace(parameters=[CONDITION, *OPERANDS.parameters.values()]),
)
def adamw_where_(condition: TensorSpec, **operands: Any) -> TensorSpec:
    """`adamw_` where a bool of one element is true; no bit of var, first and second changes where
    it is false.
    """
    check(condition.nelms == 1, "adamw_where_", "a condition of one element", condition=condition)
    return _infer("adamw_where_", AdamW(**operands))


def _infer(name: str, of: AdamW) -> TensorSpec:
    var: TensorSpec = of.var
    tensors = {n: getattr(of, n) for n in ("var", "grad", "first", "second")}
    fits = all(t.shape == var.shape for t in tensors.values())
    fits = fits and {getattr(of, n).dtype.name for n in STATE} <= {*TYPES}
    check(
        fits,
        name,
        f"tensors of one shape, with weight and moments of {', '.join(TYPES)}",
        **tensors,
    )
    factors: dict[str, TensorSpec | None] = {
        n: t
        for n, t in of._asdict().items()
        if n not in tensors and isinstance(t, TensorSpec) and t.nelms != 1
    }
    check(not factors, name, "factors of one element", **factors)
    return var
