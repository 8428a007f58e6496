"""What all layers share: parameters from a table, the two sides of a tensor-parallel computation,
dropout.

A seed is uint32 [2]; where n micro-batches run as one it is [n, 2], and dropout draws for each from
its own.
"""

import itertools

import numpy as np
import popxl
import popxl_addons as addons
from popxl import ReplicaGrouping, Tensor, ops
from popxl_addons.ops.replicated_all_reduce_TP import (
    replicated_all_reduce_identical_grad_inputs,
    replicated_all_reduce_identical_inputs,
)

from popxl_gpt.config.schema import Model
from popxl_gpt.modelling.layout import Layout
from popxl_gpt.modelling.parameters import Table, whole_name
from popxl_gpt.utils.runtime import data_type


class Layer(addons.Module):
    """A layer of the model on one replica.

    Args:
        table: the layer's parameters by name; those of sublayers may be among them.
    """

    def __init__(self, model: Model, layout: Layout, table: Table):
        super().__init__()
        self.model = model
        self.layout = layout
        self.table = layout.in_parts(table)
        self.dtype = data_type(model.precision)

    def parameter(self, name: str, dtype: popxl.dtype | None = None) -> Tensor:
        """This replica's piece of a parameter, as an input of the graph. Its variables start at
        zero.

        Args:
            dtype: none: that of the layer.
        """
        entry, dtype = self.table[name], dtype or self.dtype
        shape = entry.shard_shape(self.layout.tp1.group_size, self.layout.tp2.group_size)
        zeros = np.broadcast_to(np.zeros((), dtype.as_numpy()), shape)
        group = self.layout.holders(entry)
        return self.add_variable_input(name, lambda: zeros, dtype, replica_grouping=group)

    def parts(self, name: str) -> list[Tensor]:
        """This replica's piece of a parameter in its parts, in order."""
        return [self.parameter(each) for each in self.table if whole_name(each) == name]

    def position_in(self, group: ReplicaGrouping, name: str) -> Tensor:
        """This replica's number within its group, int32 scalar, as a further input of the graph."""
        numbers = itertools.cycle(
            [np.array(number, np.int32) for number in range(group.group_size)]
        )
        return self.add_variable_input(
            name, numbers, popxl.int32, replica_grouping=group.transpose()
        )

    def seed_over(self, seed: Tensor, group: ReplicaGrouping, name: str) -> Tensor:
        """A seed derived from one that is identical over a group, different for each of the group's
        replicas.
        """
        if group.group_size == 1:
            return seed
        return ops.create_random_seed(seed, ops.cast(self.position_in(group, name), popxl.uint32))

    def dropout(self, x: Tensor, seed: Tensor | None, name: str = "tp2_position") -> Tensor:
        """Drop hidden units, [N, H/tp2]: the same ones over tp1, different ones over tp2."""
        if seed is None or self.model.dropout == 0.0:
            return x
        return ops.dropout(x, self.seed_over(seed, self.layout.tp2, name), self.model.dropout)


def enter(x: Tensor, group: ReplicaGrouping) -> Tensor:
    """Give a value that is identical over a group to a computation that is split over it: gradients
    are summed.
    """
    return x if group.group_size == 1 else replicated_all_reduce_identical_inputs(x, group=group)


def leave(x: Tensor, group: ReplicaGrouping) -> Tensor:
    """Sum the partial results of a computation that is split over a group: the sum is identical
    over it.
    """
    return (
        x if group.group_size == 1 else replicated_all_reduce_identical_grad_inputs(x, group=group)
    )
