"""Embedding of words and positions.

N rows (micro_batch * sequence), S sequence, H hidden size, V vocabulary, P positions. tp1, tp2:
replica groups.
"""

from typing import Optional, Tuple, Union

import numpy as np
import popxl
from popxl import Tensor, ops

from popxl_gpt.config import Model
from popxl_gpt.modelling.layer import Layer, leave
from popxl_gpt.modelling.layout import Layout
from popxl_gpt.modelling.parameters import Parameter, Role, Table


class Embedding(Layer):
    """Sum of a word's and its position's vectors. Rows of both tables are split over tp1, padded at
    the end.
    """

    def __init__(self, model: Model, layout: Layout):
        super().__init__(model, layout, self.parameters(model))

    @staticmethod
    def parameters(model: Model) -> Table:
        """Word table [V, H] and position table [P, H]."""
        return {
            "word.weight": word_table(model),
            "position.weight": Parameter(
                shape=(model.positions, model.hidden_size),
                role=Role.EMBEDDING,
                tp1_axis=0,
                tp2_axis=1,
                std=model.initial_std,
            ),
        }

    def build(
        self, words: Tensor, seed: Optional[Tensor] = None, positions: Optional[Tensor] = None
    ) -> Union[Tensor, Tuple[Tensor, Tensor]]:  # int32 [N]
        """int32 [N] -> [N, H/tp2], identical over tp1. Without a seed nothing is dropped.

        Args:
            positions: of the words, int32 [N], which decoder blocks get, too, with document
                attention; none: words are whole sequences.
        """
        sequence = self.model.sequence_length
        word, position = self.parameter("word.weight"), self.parameter("position.weight")
        numbers: Tensor = (
            popxl.constant(np.arange(sequence, dtype=np.int32), popxl.int32, "positions")
            if positions is None
            else positions
        )
        is_split = self.layout.tp1.group_size > 1
        # rows count from this replica's first; others' rows are out of range and give zeros
        if is_split:
            shard = self.position_in(self.layout.tp1, "tp1_position")
            words, numbers = words - shard * word.shape[0], numbers - shard * position.shape[0]
        x = ops.gather(word, words, zero_OOR=is_split)  # [N, H/tp2], partial sums over tp1
        y = ops.gather(
            position, numbers, zero_OOR=is_split
        )  # [S or N, H/tp2], partial sums over tp1
        x = (x.reshape((-1, *y.shape)) + y).reshape(x.shape)  # the positions of each sequence
        x = leave(x, self.layout.tp1)  # [N, H/tp2], identical over tp1
        x = self.dropout(x, seed)
        if positions is None or not self.model.document_attention:
            return x
        return x, ops.identity(positions)


def word_table(model: Model) -> Parameter:
    """The word embedding [V, H], which the head uses too."""
    return Parameter(
        shape=(model.vocabulary_size, model.hidden_size),
        role=Role.EMBEDDING,
        tp1_axis=0,
        tp2_axis=1,
        std=model.initial_std,
    )
