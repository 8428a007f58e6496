"""Cross entropy of logits whose classes are split over the virtual devices of one replica."""

from popxl_addons.ops.cross_entropy_sharded_wr_loss.cross_entropy_sharded_wr_loss import (
    cross_entropy_sharded_wr_loss,
    handle_ipus,
)
