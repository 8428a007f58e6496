"""Normalisation of rows that are split over a group of replicas."""

from typing import Optional

import popxl
from popxl import ReplicaGrouping, Tensor, ops
from popxl.ops.utils import cast_if_needed

from popxl_addons.ops.replicated_all_reduce_TP import replicated_all_reduce


def layer_norm_distributed(
    t: Tensor, w: Tensor, b: Tensor, epsilon: float = 1e-5, group: Optional[ReplicaGrouping] = None
) -> Tensor:
    """Rows to mean 0 and variance 1 over the whole group, times ``w`` plus ``b``: one all-reduce forward, one backward.

    Shapes: t [N, C/size], w and b [C/size] -> [N, C/size], equal slices on every member. Statistics are float32.
    """
    if group is None or group.group_size == 1:
        return ops.layer_norm(t, w, b, epsilon)
    x = cast_if_needed(t, popxl.float32)  # [N, C/size]
    means = ops.mean(x, axis=1, keepdims=True)  # [N, 1], of this member's slice
    squares = ops.mean(x * x, axis=1, keepdims=True)
    sums = replicated_all_reduce(ops.concat([means, squares], axis=1), group=group)
    mean, square = ops.split(sums * (1.0 / group.group_size), 2, axis=1)  # [N, 1], of the whole row
    deviation = ops.sqrt(ops.maximum(square - mean * mean, popxl.constant(0, popxl.float32)) + epsilon)
    normalised = cast_if_needed((x - mean) / deviation, t.dtype)
    return normalised * w + b
