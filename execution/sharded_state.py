"""Optimizer state that is laid out as its parameter is."""

import numpy as np
import popxl
import popxl_addons as addons
from popxl import ReplicaGrouping, Tensor, ops


def add_zeros(
    module: addons.Module, name: str, var: Tensor, dtype: popxl.dtype, holders: ReplicaGrouping
) -> Tensor:
    """An input of a module's graph by reference: zeros, sharded as the variable is.

    Args:
        holders: the replicas that have the variable's piece of the parameter.
    """
    shape = var.meta_shape or var.shape
    zeros = np.broadcast_to(np.zeros((), dtype.as_numpy()), shape)
    if not var.meta_shape:
        return module.add_variable_input(
            name, lambda: zeros, dtype, by_ref=True, replica_grouping=holders
        )
    return module.add_replica_sharded_variable_input(
        name,
        lambda: zeros,
        dtype,
        by_ref=True,
        replica_grouping=holders,
        shard_over=-(-ops.multiply_tuple(shape) // var.nelms),
    )
