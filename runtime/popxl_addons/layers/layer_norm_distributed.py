"""Normalisation of rows that are split over a group of replicas."""

import numpy as np
from popxl import ReplicaGrouping, Tensor

from popxl_addons.module import Module
from popxl_addons.ops.layer_norm_distributed import layer_norm_distributed


class LayerNormDistributed(Module):
    """`LayerNorm` of rows [N, C] of which each replica of the group has C / size; likewise of
    ``weight`` and ``bias``.

    Args:
        replica_grouping: replicas over which a row is split; None: rows are whole.
    """

    def __init__(self, replica_grouping: ReplicaGrouping | None = None) -> None:
        super().__init__()
        self.replica_grouping = replica_grouping

    def build(self, x: Tensor, eps: float = 1e-5) -> Tensor:
        """Shapes: ``[N, C/size] -> [N, C/size]``. ValueError for another rank."""
        sharing = self.replica_grouping.transpose() if self.replica_grouping is not None else None
        size = x.shape[-1]
        self.weight = self.add_variable_input(
            "weight", lambda: np.ones(size), x.dtype, replica_grouping=sharing
        )
        self.bias = self.add_variable_input(
            "bias", lambda: np.zeros(size), x.dtype, replica_grouping=sharing
        )
        return layer_norm_distributed(x, self.weight, self.bias, eps, self.replica_grouping)
