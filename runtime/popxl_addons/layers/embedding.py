"""Table lookup, with the rows of the table split over groups of replicas if asked for."""

import numpy as np
import popxl
from popxl import ReplicaGrouping, Tensor, ops

from popxl_addons.layers.initial import truncated_normal
from popxl_addons.module import Module

ROW_MULTIPLE = 16


class Embedding(Module):
    """Rows of ``weight`` [vocab, hidden] by index.

    With a grouping of n > 1 groups, each group holds one slice of `get_vocab_shard_size` rows.
    Indices are then relative to the slice's first row (`get_offsets`), and those outside it give
    zeros.

    Args:
        axis: the table's axis that indices select from.
        replica_grouping: replicas that hold the same slice.
    """

    def __init__(
        self,
        dtype: popxl.dtype,
        vocab_size: int,
        hidden_size: int,
        axis: int = 0,
        replica_grouping: ReplicaGrouping | None = None,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.axis = axis
        self.replica_grouping = replica_grouping
        self.n_shards = replica_grouping.num_groups if replica_grouping is not None else 1
        self.vocab_shard_size = self.get_vocab_shard_size(vocab_size, self.n_shards)

    @staticmethod
    def get_vocab_shard_size(vocab_size: int, n_shards: int) -> int:
        """Rows of one slice: ceil(vocab_size / n_shards), in multiples of 16; a whole table is not
        padded.
        """
        if n_shards == 1:
            return vocab_size
        rows = -(-vocab_size // n_shards)
        return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE

    @staticmethod
    def get_offsets(vocab_size: int, n_shards: int) -> np.ndarray:
        """First row of each slice: int32 [n_shards]."""
        return (np.arange(n_shards) * Embedding.get_vocab_shard_size(vocab_size, n_shards)).astype(
            np.int32
        )

    def build(self, indices: Tensor) -> Tensor:
        """Look up: ``[...] -> [..., hidden]``."""
        shape = (self.vocab_shard_size, self.hidden_size)
        if self.axis % 2:
            shape = shape[::-1]
        self.weight = self.add_variable_input(
            "weight",
            lambda: truncated_normal(shape),
            self.dtype,
            replica_grouping=self.replica_grouping,
        )
        return ops.gather(self.weight, indices, axis=self.axis, zero_OOR=self.n_shards > 1)
