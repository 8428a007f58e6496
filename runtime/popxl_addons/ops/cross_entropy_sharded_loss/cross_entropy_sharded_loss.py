"""Cross entropy of logits whose classes are split over a group of replicas."""

from typing import Literal

import numpy as np
import popxl
from popxl import ReplicaGrouping, Tensor, TensorSpec, ops
from popxl.errors import DTypeError, ShapeError
from popxl.opdef import Cost, op
from popxl.ops.utils import cast_if_needed

from popxl_addons.ops.replicated_all_reduce_TP import replicated_all_reduce_identical_grad_inputs

REDUCTION_TYPE = Literal["mean", "sum", "none"]
EXP_FLOPS = 8


@op
def logsumexp_and_pick(logits: Tensor, indices: Tensor) -> tuple[TensorSpec, TensorSpec]:
    """The logarithm of the sum of exponentials of each row, and the logit at an index.

    Shapes: logits [n, c], floating point; indices [n], integer -> (log-sum-exp [n], picked [n]),
    float32 or wider. An index outside [0, c) picks zero.
    Raises:
        ShapeError: other shapes.
        DTypeError: logits that are not floating point, or indices that are not integer.
    """
    if len(logits.shape) != 2 or indices.shape != logits.shape[:1]:
        raise ShapeError(
            f"logsumexp_and_pick: got logits {logits.spec} and indices {indices.spec}; expected "
            "[n, classes] and [n]. Reshape them first."
        )
    if not logits.dtype.is_floating_point or not indices.dtype.is_int:
        raise DTypeError(
            f"logsumexp_and_pick: got logits {logits.spec} and indices {indices.spec}; expected "
            "floating-point logits and integer indices. Cast them first."
        )
    wide = popxl.float64 if logits.dtype is popxl.float64 else popxl.float32
    return TensorSpec(indices.shape, wide), TensorSpec(indices.shape, wide)


@logsumexp_and_pick.vjp
def logsumexp_and_pick_vjp(
    dy: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor], logits: Tensor, indices: Tensor
) -> tuple[Tensor, None]:
    """Softmax times the first gradient, plus the second one at the index."""
    return logsumexp_and_pick_grad(dy[0], dy[1], y[0], logits, indices), None


@logsumexp_and_pick.cost
def logsumexp_and_pick_cost(
    y: tuple[TensorSpec, TensorSpec], logits: Tensor, indices: Tensor
) -> Cost:
    """A maximum, an exponential and a sum per logit."""
    return Cost(flops=(EXP_FLOPS + 2) * logits.nelms)


@op(differentiable=False)
def logsumexp_and_pick_grad(
    d_logsumexp: Tensor, d_picked: Tensor, logsumexp: Tensor, logits: Tensor, indices: Tensor
) -> TensorSpec:
    """Gradient of logsumexp_and_pick with respect to the logits.

    Shapes: d_logsumexp, d_picked, logsumexp and indices [n], logits [n, c] -> [n, c], the logits'
    dtype.
    """
    return TensorSpec(logits.shape, logits.dtype)


@logsumexp_and_pick_grad.cost
def logsumexp_and_pick_grad_cost(
    y: TensorSpec,
    d_logsumexp: Tensor,
    d_picked: Tensor,
    logsumexp: Tensor,
    logits: Tensor,
    indices: Tensor,
) -> Cost:
    """A difference, an exponential and a product per logit."""
    return Cost(flops=(EXP_FLOPS + 2) * logits.nelms)


def cross_entropy_sharded_loss(
    logits: Tensor,
    indices: Tensor,
    ignore_index: None | int | Tensor = None,
    replica_grouping: ReplicaGrouping | None = None,
    reduction: REDUCTION_TYPE = "mean",
    available_memory_proportion: float = 0.4,
) -> Tensor:
    """Negative log-softmax at each row's class, the same on every member; a member never holds more
    than its own logits.

    The gradient on a member is (its slice of the softmax - of the one-hot label) times the row's
    gradient: no collective.

    Shapes: logits [n, classes/size], indices [n] -> [] or, for "none", [n]; logits' dtype. Computed
        in float32.
    Args:
        indices: class of each row minus this member's first class: in [0, classes/size) on one
            member only.
        ignore_index: rows with this index (shifted as the indices are) count zero.
        replica_grouping: members that hold the classes; default: all replicas.
        reduction: "mean" over the rows that count, "sum" or "none".
        available_memory_proportion: a hint without effect.
    Raises:
        ValueError: another reduction.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(
            f"cross_entropy_sharded_loss: got reduction {reduction!r}; expected 'mean', 'sum' "
            "or 'none'."
        )
    group = popxl.gir().replica_grouping() if replica_grouping is None else replica_grouping
    normaliser, picked = normaliser_and_logit(logits, indices, group)
    loss = reduced_loss(normaliser - picked, indices, ignore_index, reduction)
    return cast_if_needed(loss, logits.dtype)


def normaliser_and_logit(
    logits: Tensor, indices: Tensor, group: ReplicaGrouping
) -> tuple[Tensor, Tensor]:
    """The logarithm of the sum of exponentials of each row's logits, and the logit at its class,
    the same on every member.

    Shapes: logits [n, classes/size], indices [n] as of `cross_entropy_sharded_loss` -> [n], [n],
        float32 or wider.
    """
    # of this member's classes
    normaliser, picked = logsumexp_and_pick(logits, indices)
    if group.group_size > 1:
        top = ops.detach(
            ops.collectives.replicated_all_reduce(ops.detach(normaliser), "max", group)
        )
        total = replicated_all_reduce_identical_grad_inputs(ops.exp(normaliser - top), group=group)
        normaliser = top + ops.log(total)  # [n], of all classes
        picked = replicated_all_reduce_identical_grad_inputs(picked, group=group)
    return normaliser, picked


def reduced_loss(
    loss: Tensor, indices: Tensor, ignore_index: None | int | Tensor, reduction: REDUCTION_TYPE
) -> Tensor:
    """Rows' losses [n] to what is asked for, without the rows to ignore."""
    if ignore_index is None:
        return (
            loss
            if reduction == "none"
            else ops.mean(loss)
            if reduction == "mean"
            else ops.sum(loss)
        )
    ignored = (
        ignore_index
        if isinstance(ignore_index, Tensor)
        # unsigned labels have one below zero as what it is modulo their type
        else popxl.constant(np.array(ignore_index).astype(indices.dtype.as_numpy()))
    )
    is_kept = ops.logical_not(ops.equal(indices, cast_if_needed(ignored, indices.dtype)))
    # a choice, not a product: the loss of a row to ignore may be infinite
    loss = ops.where(is_kept, loss, popxl.constant(0, loss.dtype))
    if reduction == "none":
        return loss
    total, kept = ops.sum(loss), ops.cast(is_kept, loss.dtype)
    return (
        total
        if reduction == "sum"
        else total / ops.maximum(ops.sum(kept), popxl.constant(1, loss.dtype))
    )
