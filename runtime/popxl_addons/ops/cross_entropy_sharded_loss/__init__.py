"""Cross entropy of logits whose classes are split over a group of replicas."""

from popxl_addons.ops.cross_entropy_sharded_loss.cross_entropy_sharded_loss import (
    REDUCTION_TYPE,
    cross_entropy_sharded_loss,
    logsumexp_and_pick,
    logsumexp_and_pick_grad,
    normaliser_and_logit,
    reduced_loss,
)
