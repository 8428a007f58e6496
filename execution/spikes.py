"""Steps whose gradient norm is far above those before: the program leaves their update out.

Norms have a running mean m and variance v, plain over the first `spike_window` steps W, and
exponential from then on:

    a = 1 / min(n, W); d = norm - m; m += a*d; v = (1 - a) * (v + a*d^2)

for the n-th finite norm. After W of them a norm above m + spike_threshold * sqrt(v) is a spike. It
counts in m and v as that limit, so that norms that stay high are followed and no longer spikes.
Source: West 1979, Updating mean and variance estimates, doi:10.1145/359146.359153.
"""

import popxl
from popxl import Tensor, ops
from popxl_addons.named_tensors import NamedTensors

from popxl_gpt.config.schema import Training

LARGEST = 1e18
"""The norm as which larger ones count: float32 holds its square."""


def norm_limit(training: Training, counted: NamedTensors) -> Tensor:
    """The norm above which this step's is a spike, float32 scalar: infinite while too few came
    before.
    """
    limit = counted.norm_mean + ops.sqrt(counted.norm_variance) * training.spike_threshold
    window = popxl.constant(training.spike_window, popxl.int32)
    is_young = ops.greater(window, counted.norm_count)
    return ops.where(is_young, popxl.constant(float("inf"), popxl.float32), limit)


def is_at_most(norm: Tensor, limit: Tensor) -> Tensor:
    """Whether a finite norm is no spike, bool scalar."""
    return ops.logical_not(ops.greater(norm, limit))


def follow_norm(
    training: Training, norm: Tensor, limit: Tensor, is_finite: Tensor, counted: NamedTensors
) -> None:
    """Take a step's norm into mean and variance, if it is finite, and count it where it is a
    spike.
    """
    mean, variance, count = counted.norm_mean, counted.norm_variance, counted.norm_count
    is_spike = ops.logical_and(is_finite, ops.greater(norm, limit))
    ops.add_(counted.spikes, ops.cast(is_spike, popxl.int32))
    for bound in (limit, popxl.constant(LARGEST, popxl.float32)):
        norm = ops.where(ops.greater(norm, bound), bound, norm)
    window = popxl.constant(training.spike_window, popxl.int32)
    # as of a run that had this window from its begin, where it has counted beyond it
    after = ops.where(ops.greater(window, count), count + 1, window)
    share = popxl.constant(1.0, popxl.float32) / ops.cast(after, popxl.float32)
    difference = norm - mean
    spread = (variance + share * difference * difference) * (1.0 - share)
    for variable, value in (
        (mean, mean + share * difference),
        (variance, spread),
        (count, after),
    ):
        ops.var_updates.copy_var_update_(variable, ops.where(is_finite, value, variable))
