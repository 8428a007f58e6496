"""The parts of a cross entropy that touch every logit, with logits that are bounded on the way."""

from typing import Any

from popxl.op_records import OPS, Cost, as_specs
from popxl.tensor import TensorSpec

from popxl_engine.ops.definition import check, flops_of, fused_op


def softcap_logsumexp_and_pick_cost(y: Any, logits: TensorSpec, *rest: Any) -> Cost:
    """The bound, and the loss."""
    indices, cap = rest
    bounded = flops_of("softcap", logits, logits, cap)
    return Cost(flops=bounded + flops_of("logsumexp_and_pick", y[0], logits, indices))


@fused_op(cost=softcap_logsumexp_and_pick_cost)
def softcap_logsumexp_and_pick(
    logits: TensorSpec, indices: TensorSpec, cap: float
) -> tuple[TensorSpec, ...]:
    """`logsumexp_and_pick` of `softcap(logits, cap)`, which is stored nowhere.

    Shapes: logits [n, c], indices [n] -> [n], [n], float32 or wider.
    """
    return as_specs(OPS["logsumexp_and_pick"].infer(logits, indices))


def softcap_logsumexp_and_pick_grad_cost(y: TensorSpec, *operands: Any) -> Cost:
    """The bound once more, both gradients."""
    *rest, cap = operands
    flops = flops_of("softcap", y, y, cap) + flops_of("softcap_grad", y, y, y, cap)
    return Cost(flops=flops + flops_of("logsumexp_and_pick_grad", y, *rest))


@fused_op(cost=softcap_logsumexp_and_pick_grad_cost)
def softcap_logsumexp_and_pick_grad(
    d_logsumexp: TensorSpec,
    d_picked: TensorSpec,
    logsumexp: TensorSpec,
    logits: TensorSpec,
    indices: TensorSpec,
    cap: float,
) -> TensorSpec:
    """Gradient of `softcap_logsumexp_and_pick` with respect to the logits.

    Shapes: d_logsumexp, d_picked, logsumexp and indices [n], logits [n, c] -> [n, c].
    """
    rows = (d_logsumexp, d_picked, logsumexp, indices)
    fits = logits.rank == 2 and all(t.shape == logits.shape[:1] for t in rows)
    name = "softcap_logsumexp_and_pick_grad"
    check(fits, name, "logits [n, c] and the others [n]", logits=logits, logsumexp=logsumexp)
    return TensorSpec(logits.shape, logits.dtype)


def cross_entropy_and_grad_cost(y: Any, *operands: Any) -> Cost:
    """The loss, and its gradient; of bounded logits with the bound and its slope."""
    d_logsumexp, d_picked, logits, indices, cap = operands
    total, _, gradient = y
    flops = flops_of("logsumexp_and_pick", total, logits, indices)
    slopes = (d_logsumexp, d_picked, total, logits, indices)
    flops += flops_of("logsumexp_and_pick_grad", gradient, *slopes)
    if cap is not None:
        flops += flops_of("softcap", logits, logits, cap)
        flops += flops_of("softcap_grad", logits, logits, logits, cap)
    return Cost(flops=flops)


@fused_op(cost=cross_entropy_and_grad_cost)
def cross_entropy_and_grad(
    d_logsumexp: TensorSpec,
    d_picked: TensorSpec,
    logits: TensorSpec,
    indices: TensorSpec,
    cap: float | None,
) -> tuple[TensorSpec, ...]:
    """`logsumexp_and_pick` of logits that ``cap`` bounds, and the gradient with respect to them.

    Shapes: d_logsumexp, d_picked and indices [n], logits [n, c] -> [n], [n], [n, c].
    """
    total, picked = as_specs(OPS["logsumexp_and_pick"].infer(logits, indices))
    fits = all(t.shape == logits.shape[:1] for t in (d_logsumexp, d_picked))
    name = "cross_entropy_and_grad"
    check(fits, name, "logits [n, c] and gradients [n]", logits=logits, d_picked=d_picked)
    return total, picked, TensorSpec(logits.shape, logits.dtype)
