"""Optimizers: one file each, a module whose graph updates one variable."""

from popxl_addons.optimizers.adam import AdamOptimizerStep
