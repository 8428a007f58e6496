"""Embedding of words and positions.

N rows (micro_batch * sequence), S sequence, H hidden size, V vocabulary, P positions. tp1, tp2:
replica groups.
"""

import numpy as np
import popxl
from popxl import Tensor, ops

from popxl_gpt.config import Model
from popxl_gpt.modelling.layer import Layer, leave
from popxl_gpt.modelling.layout import Layout
from popxl_gpt.modelling.parameters import Parameter, Role, Table


class Embedding(Layer):
    """A word's vector, and where positions are learned that of its position added to it. Rows of
    both tables are split over tp1, padded at the end.
    """

    def __init__(self, model: Model, layout: Layout):
        super().__init__(model, layout, self.parameters(model))

    @staticmethod
    def parameters(model: Model) -> Table:
        """Word table [V, H] and, for learned positions, position table [P, H]."""
        table = {"word.weight": word_table(model)}
        if model.has_position_table:
            table["position.weight"] = Parameter(
                shape=(model.positions, model.hidden_size),
                role=Role.EMBEDDING,
                tp1_axis=0,
                tp2_axis=1,
                std=model.initial_std,
            )
        return table

    def build(
        self, words: Tensor, seed: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, ...]:  # int32 [N]
        """int32 [N] -> [N, H/tp2], identical over tp1, and what decoder blocks get beside it.
        Without a seed nothing is dropped.

        Args:
            positions: of the words, int32 [N], which blocks get with document attention; none:
                words are whole sequences.
        """
        word, is_split = self.parameter("word.weight"), self.layout.tp1.group_size > 1
        shard = self.position_in(self.layout.tp1, "tp1_position") if is_split else None
        x = _gathered(word, words, shard)  # [N, H/tp2], partial sums over tp1
        if self.model.has_position_table:
            position, numbers = self.parameter("position.weight"), positions
            if numbers is None:
                count = np.arange(self.model.sequence_length, dtype=np.int32)
                numbers = popxl.constant(count, popxl.int32, "positions")
            y = _gathered(position, numbers, shard)  # [S or N, H/tp2], partial sums over tp1
            x = (x.reshape((-1, *y.shape)) + y).reshape(x.shape)  # the positions of each sequence
        x = leave(x, self.layout.tp1)  # [N, H/tp2], identical over tp1
        x = self.dropout(x, seed)
        beside = (
            positions if self.model.document_attention else None,
            words if self.model.value_embeddings else None,
        )
        return (x, *(ops.identity(t) for t in beside if t is not None))


def _gathered(table: Tensor, numbers: Tensor, shard: Tensor | None) -> Tensor:
    """Rows of a table, of which this replica has the shard of this number, int32 scalar; none: all.
    Zeros for others' rows.
    """
    if shard is None:
        return ops.gather(table, numbers)
    # rows count from this replica's first; others' rows are out of range
    return ops.gather(table, numbers - shard * table.shape[0], zero_OOR=True)


def word_table(model: Model) -> Parameter:
    """The word embedding [V, H], which a tied head uses, too; another one has its own alike."""
    return Parameter(
        shape=(model.vocabulary_size, model.hidden_size),
        role=Role.EMBEDDING,
        tp1_axis=0,
        tp2_axis=1,
        std=model.initial_std,
    )
