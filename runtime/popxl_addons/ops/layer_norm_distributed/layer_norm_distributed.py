"""Normalisation of rows that are split over a group of replicas."""

import popxl
from popxl import ReplicaGrouping, Tensor, ops
from popxl.ops.utils import cast_if_needed

from popxl_addons.ops.replicated_all_reduce_TP import replicated_all_reduce_identical_inputs


def layer_norm_distributed(
    t: Tensor, w: Tensor, b: Tensor, epsilon: float = 1e-5, group: ReplicaGrouping | None = None
) -> Tensor:
    """Rows to mean 0 and variance 1 over the whole group, times ``w`` plus ``b``: a gather forward,
    an all-reduce back.

    Shapes: t [N, C/size], w and b [C/size] -> [N, C/size], equal slices on every member. Statistics
    are float32.
    """
    if group is None or group.group_size == 1:
        return ops.layer_norm(t, w, b, epsilon)
    x = cast_if_needed(t, popxl.float32)  # [N, C/size]
    mean, rest, variance = _statistics(x, group)
    normalised = cast_if_needed((x - mean - rest) / ops.sqrt(variance + epsilon), t.dtype)
    return normalised * w + b


def _statistics(x: Tensor, group: ReplicaGrouping) -> tuple[Tensor, Tensor, Tensor]:
    """Of whole rows: the mean, what rounding took from it, and the variance; [N, C/size] -> [N, 1]
    each.

    Each member sends those of its slice, and all merge them: squares are only taken of deviations,
    so that rows far from zero lose no digits. What is detached has gradient zero in exact
    arithmetic.
    Source: Chan, Golub and LeVeque 1983, The American Statistician 37(3), section 2.
    """
    mean = ops.mean(x, axis=1, keepdims=True)  # [N, 1], of this member's slice
    centred = x - ops.detach(mean)
    rest = ops.detach(ops.mean(centred, axis=1, keepdims=True))
    centred = centred - rest
    variance = ops.mean(centred * centred, axis=1, keepdims=True)
    own = ops.concat([mean, rest, variance], axis=1)
    # [size, N, 3]
    slices = ops.collectives.replicated_all_gather(own, group=group, output_shape="new_axis")
    # its gradient is summed over the group
    slices = replicated_all_reduce_identical_inputs(slices, group=group)
    means, rests, variances = ops.split(slices, 3, axis=2)  # [size, N, 1]
    mean = ops.mean(means, axis=0)
    deviations = means - ops.detach(mean) + rests
    rest = ops.detach(ops.mean(deviations, axis=0))
    deviations = deviations - rest
    return mean, rest, ops.mean(variances + deviations * deviations, axis=0)
