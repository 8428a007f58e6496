"""Normalisation of rows that are split over a group of replicas."""

from popxl_addons.ops.layer_norm_distributed.layer_norm_distributed import layer_norm_distributed
