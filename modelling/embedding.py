"""Embedding of words, of pairs of words, and of positions.

N rows (micro_batch * sequence), S sequence, H hidden size, V vocabulary, P positions, R rows of the
table of pairs. tp1, tp2: replica groups.
"""

import math
from dataclasses import replace

import numpy as np
import popxl
from popxl import Tensor, ops

from popxl_gpt.config.schema import Model
from popxl_gpt.modelling.layer import Layer, enter, leave
from popxl_gpt.modelling.layout import Layout
from popxl_gpt.modelling.parameters import Parameter, Role, Table

PAIR_RATE = 0.2
"""Learning rate of the vectors of pairs over that of other embeddings."""
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class Embedding(Layer):
    """A word's vector, to which are added that of the word before times a factor per channel, with
    a token shift; that of the pair which it is with the word before, where there are such; and that
    of its position, where positions are learned. Rows of all tables are split over tp1, padded at
    the end.

    Sources: Peng et al. 2023, "RWKV", arXiv:2305.13048, section 3.1 (token shift); Vaswani et al.
    2017, arXiv:1706.03762, section 3.4 (scaled vectors of words); Svenstrup et al. 2017, "Hash
    Embeddings", arXiv:1709.03933 (pairs that share rows).
    """

    def __init__(self, model: Model, layout: Layout):
        super().__init__(model, layout, self.parameters(model))

    @staticmethod
    def parameters(model: Model) -> Table:
        """Word table [V, H], the token shift's factors [H], the table of pairs [R, H], and, for
        learned positions, position table [P, H].
        """
        table = {"word.weight": word_table(model)}
        if model.token_shift:
            table["shift.weight"] = Parameter(
                shape=(model.hidden_size,), role=Role.EMBEDDING, tp2_axis=0, mean=0.5
            )
        if model.bigram_rows:
            table["bigram.weight"] = replace(_vectors(model, model.bigram_rows), rate=PAIR_RATE)
        if model.has_position_table:
            table["position.weight"] = _vectors(model, model.positions)
        return table

    def build(
        self,
        words: Tensor,
        seed: Tensor | None = None,
        positions: Tensor | None = None,
        before: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # int32 [N]
        """int32 [N] -> [N, H/tp2], identical over tp1, and what decoder blocks get beside it.
        Without a seed nothing is dropped.

        Args:
            positions: of the words, int32 [N], which blocks get with document attention; none:
                words are whole sequences.
            before: where the model looks at it, the word before each, int32 [N], -1 where there is
                none; not given: the one before it in its sequence, or document.
        """
        is_split = self.layout.tp1.group_size > 1
        shard = self.position_in(self.layout.tp1, "tp1_position") if is_split else None
        if self.model.has_word_before and before is None:
            before = self._before(words, positions)
        x = self._words(words, shard, before if self.model.token_shift else None)
        if self.model.embedding_scale != 1.0:
            x = x * popxl.constant(self.model.embedding_scale, x.dtype, "scale")
        if self.model.bigram_rows:
            assert before is not None
            x = x + _gathered(self.parts("bigram.weight"), self._pairs(words, before), shard)
        if self.model.has_position_table:
            position, numbers = self.parts("position.weight"), positions
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

    def _words(self, words: Tensor, shard: Tensor | None, before: Tensor | None) -> Tensor:
        """The vectors of words, [N, H/tp2], partial sums over tp1."""
        table = self.parts("word.weight")
        if before is None:
            return _gathered(table, words, shard)
        both = _gathered(table, ops.concat([words, before]), shard, zero_OOR=True)
        x, y = ops.split(both, 2)
        return x + y * enter(self.parameter("shift.weight"), self.layout.tp1)

    def _pairs(self, words: Tensor, before: Tensor) -> Tensor:
        """The row of each word and the one before it in the table of pairs, int32 [N]: (word +
        offset of the word before) modulo R.

        Offsets are multiples of the golden ratio of R. So rows of pairs with one word before are
        all different, where R is V or more, and those with words before of close numbers, which
        are about equally frequent, lie far apart.
        """
        rows = self.model.bigram_rows
        step = round(rows * GOLDEN_RATIO)
        numbers = np.arange(self.model.vocabulary_size + 1, dtype=np.int64)  # from no word on
        offsets = popxl.constant((numbers * step % rows).astype(np.int32), popxl.int32, "offsets")
        one, count = (popxl.constant(n, popxl.int32) for n in (1, rows))
        return ops.fmod(words + ops.gather(offsets, before + one), count)

    def _before(self, words: Tensor, positions: Tensor | None) -> Tensor:
        """The word before each in its sequence, or in its document where there are positions; -1
        for the first.
        """
        rows = words.reshape((-1, self.model.sequence_length))
        before: Tensor = popxl.constant(np.full((rows.shape[0], 1), -1, np.int32))
        if rows.shape[1] > 1:
            before = ops.concat([before, rows[:, :-1]], 1)
        before = before.reshape(words.shape)
        return before if positions is None else none_before_first(before, positions)


def none_before_first(before: Tensor, positions: Tensor) -> Tensor:
    """The word before each, and -1 before the first of a text: int32, all of one shape."""
    first, none = (popxl.constant(n, popxl.int32) for n in (0, -1))
    return ops.where(ops.equal(positions, first), none, before)


def _gathered(
    parts: list[Tensor], numbers: Tensor, shard: Tensor | None, zero_OOR: bool = False
) -> Tensor:
    """Rows of a table in parts, of which this replica has the shard of this number, int32 scalar;
    none: all. Zeros for others' rows.
    """
    if shard is not None:
        # rows count from this replica's first; others' rows are out of range
        numbers, zero_OOR = numbers - shard * sum(part.shape[0] for part in parts), True
    first, *others = parts
    x = ops.gather(first, numbers, zero_OOR=zero_OOR or bool(others))
    begin = first.shape[0]
    for part in others:  # each row is of one part, and zero in the others
        own = numbers - popxl.constant(begin, popxl.int32)
        x = x + ops.gather(part, own, zero_OOR=True)
        begin += part.shape[0]
    return x


def word_table(model: Model) -> Parameter:
    """The word embedding [V, H], which a tied head uses, too; another one has its own alike."""
    return Parameter(
        shape=(model.vocabulary_size, model.hidden_size),
        role=Role.EMBEDDING,
        tp1_axis=0,
        tp2_axis=1,
        std=model.initial_std,
        is_in_parts=True,
    )


def _vectors(model: Model, rows: int) -> Parameter:
    """A table of so many vectors that are added to those of words, [rows, H]."""
    return Parameter(
        shape=(rows, model.hidden_size),
        role=Role.EMBEDDING,
        tp1_axis=0,
        tp2_axis=1,
        std=model.initial_std,
    )
