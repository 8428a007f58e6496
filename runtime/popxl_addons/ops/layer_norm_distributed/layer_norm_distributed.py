"""Normalisation of rows that are split over a group of replicas."""

import popxl
from popxl import ReplicaGrouping, Tensor, ops
from popxl.ops.normalisation import merge_moments
from popxl.ops.utils import cast_if_needed

from popxl_addons.ops.own_gradient import with_gradient

Gradients = tuple[Tensor, None]


def layer_norm_distributed(
    t: Tensor, w: Tensor, b: Tensor, epsilon: float = 1e-5, group: ReplicaGrouping | None = None
) -> Tensor:
    """Rows to mean 0 and variance 1 over the whole group, times ``w`` plus ``b``: a gather forward,
    an all-reduce back.

    Shapes: t [N, C/size], w and b [C/size] -> [N, C/size], equal slices on every member. Statistics
    are float32. ValueError for others.
    """
    if len(t.shape) != 2 or not w.shape == b.shape == t.shape[1:]:
        raise ValueError(
            f"layer_norm_distributed: got t {t.spec}, w {w.spec} and b {b.spec}; expected two axes "
            "[N, C/size] and w and b [C/size]. Reshape it first."
        )
    if group is None or group.group_size == 1:
        return ops.layer_norm(t, w, b, epsilon)
    normalised = _normalised(cast_if_needed(t, popxl.float32), epsilon, group)
    return cast_if_needed(normalised, t.dtype) * w + b


def _normalised(x: Tensor, epsilon: float, group: ReplicaGrouping) -> Tensor:
    """Whole rows to mean 0 and variance 1; [N, C/size] -> [N, C/size].

    Each member sends what it knows of its slice, and all merge that: squares are only taken of
    deviations, so that rows far from zero lose no digits.
    Source: Chan, Golub and LeVeque 1983, The American Statistician 37(3), section 2.
    """
    mean = ops.detach(_row_mean(x))  # [N, 1], of this member's slice
    centred = x - mean
    known = ops.detach(centred)
    rest = _row_mean(known)  # what rounding took from the mean
    own = ops.concat([mean, rest, _row_mean(known * known) - rest * rest], axis=1)
    # [size, N, 3]
    slices = ops.collectives.replicated_all_gather(own, group=group, output_shape="new_axis")
    shift, variance = merge_moments(own, slices)  # [N, 1] each
    centred = centred + shift
    scale = 1.0 / ops.sqrt(variance + epsilon)

    def gradient(dy: Tensor, y: Tensor, lhs: Tensor, rhs: Tensor, **_: object) -> Gradients:
        """The gradient of the whole normalisation, where what is centred goes by parts that are
        constants here.
        """
        parts = ops.concat([_row_mean(dy), _row_mean(dy * y)], axis=1)  # [N, 2]
        parts = ops.collectives.replicated_all_reduce(parts, "mean", group)
        along_one, along_y = ops.split(parts, 2, axis=1)
        return (dy - along_one - y * along_y) * rhs, None

    return with_gradient(ops.mul, {"lhs": centred, "rhs": scale}, gradient)


def _row_mean(t: Tensor) -> Tensor:
    return ops.mean(t, axis=1, keepdims=True)
