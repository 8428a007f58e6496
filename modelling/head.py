"""Head: norm, logits by the word embedding or by a matrix of its own, loss.

N rows (micro_batch * sequence), H hidden size, V vocabulary. tp1, tp2: replica groups.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

import numpy as np
import popxl
from popxl import Tensor, ops
from popxl_addons.ops.cross_entropy_sharded_loss import cross_entropy_sharded_loss

from popxl_gpt.config.schema import Model
from popxl_gpt.modelling.embedding import word_table
from popxl_gpt.modelling.layer import Layer, enter, leave
from popxl_gpt.modelling.layout import Layout
from popxl_gpt.modelling.norm import Norm
from popxl_gpt.modelling.parameters import Role, Table, nested
from popxl_gpt.utils.runtime import normaliser_and_logit, reduced_loss, softcap

IGNORED = -100
"""A label that counts for nothing, as in PyTorch and Hugging Face."""
TIED = "word.weight"
"""The embedding's parameter that a tied head uses as well; its name is the same in both."""
UNTIED = "output.weight"
"""The parameter of a head that is not tied, of the same shape."""


class Head(Layer):
    """What the heads share: logits.

    Source of the bound of logits: Gemma Team 2024, arXiv:2408.00118, section 2.
    """

    def __init__(self, model: Model, layout: Layout):
        table = self.parameters(model)
        super().__init__(
            model, layout, {TIED: word_table(model), **table} if model.tied_head else table
        )
        self.norm = Norm(model, layout)
        self.matrix = TIED if model.tied_head else UNTIED

    @staticmethod
    def parameters(model: Model) -> Table:
        """The head's own; a tied word embedding is the embedding's."""
        own = {} if model.tied_head else {UNTIED: replace(word_table(model), role=Role.HEAD)}
        return {**nested(norm=Norm.parameters(model)), **own}

    # [N, H/tp2], identical over tp1
    def logits(self, x: Tensor, first: Tensor | None) -> Tensor:
        """[N, H/tp2] -> float32 [N, V/tp1], identical over tp2; padded classes at -inf."""
        x = enter(self.norm(x), self.layout.tp1)
        matrix, cap = self.parts(self.matrix), self.model.logit_softcap
        products = [x @ part.transpose() for part in matrix]
        y = products[0] if len(products) == 1 else ops.concat(products, 1)
        y = leave(y, self.layout.tp2)  # [N, V/tp1], identical over tp2
        y = ops.cast(y, popxl.float32)
        if cap:
            y = softcap(y, cap)
        classes = y.shape[1]
        if first is None or classes * self.layout.tp1.group_size == self.model.vocabulary_size:
            return y
        numbers = popxl.constant(np.arange(classes, dtype=np.int32), popxl.int32) + first
        is_padding = ops.greater(
            numbers, popxl.constant(self.model.vocabulary_size - 1, popxl.int32)
        )
        return ops.where(is_padding, popxl.constant(-np.inf, popxl.float32), y)

    def first_class(self) -> Tensor | None:
        """Number of this replica's first class, int32 scalar; None where it has all of them."""
        if self.layout.tp1.group_size == 1:
            return None
        shard_shape = word_table(self.model).shard_shape(
            self.layout.tp1.group_size, self.layout.tp2.group_size
        )
        return self.position_in(self.layout.tp1, "tp1_position") * shard_shape[0]


CROSS_ENTROPY = MappingProxyType({"cross_entropy": 1.0})
"""The losses of a head, with their weights, where nothing else is said."""


class LossHead(Head):
    """Losses of the next words, without the whole vocabulary's logits on any replica.

    Args:
        weights: of the losses whose sum is trained, by name.
    Source of the z-loss: Chowdhery et al. 2022, "PaLM", arXiv:2204.02311, section 5.
    """

    def __init__(self, model: Model, layout: Layout, weights: Mapping[str, float] = CROSS_ENTROPY):
        super().__init__(model, layout)
        self.weights = weights

    # [N, H/tp2] identical over tp1, int32 [N]
    def build(self, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """[N, H/tp2], int32 [N] -> float32 scalars, identical over tp1 and tp2: the sum of the
        losses, of which each is a mean over the rows, and where there are several, each by itself.
        """
        return self.summed(self.losses(x, labels, "mean"))

    def losses(
        self,
        x: Tensor,
        labels: Tensor,
        reduction: Literal["mean", "sum", "none"],
        ignored: int | None = None,
    ) -> list[Tensor]:
        """[N, H/tp2], int32 [N] -> float32 of each loss: of each row, or their mean or sum.

        Args:
            ignored: a label whose rows count zero.
        """
        first = self.first_class()
        logits = self.logits(x, first)
        ignored_here: None | int | Tensor = ignored
        if first is not None:
            labels = labels - first
            if ignored is not None:
                ignored_here = popxl.constant(ignored, popxl.int32) - first
        normaliser, picked = normaliser_and_logit(logits, labels, self.layout.tp1)
        rows = {"cross_entropy": normaliser - picked}
        if "z_loss" in self.weights:
            rows["z_loss"] = normaliser * normaliser
        return [reduced_loss(rows[name], labels, ignored_here, reduction) for name in self.weights]

    def summed(self, losses: list[Tensor]) -> tuple[Tensor, ...]:
        """The losses' sum by their weights, and where there are several, each by itself."""
        total, *others = (
            loss if weight == 1.0 else loss * weight
            for loss, weight in zip(losses, self.weights.values())
        )
        for other in others:
            total = total + other
        return (total, *losses) if others else (total,)


class MaskedLossHead(LossHead):
    """Losses of the next words that count; labels of the others are `IGNORED`."""

    # [N, H/tp2] identical over tp1, int32 [N], float32 scalar
    def build(  # type: ignore[override]
        self, x: Tensor, labels: Tensor, weight: Tensor
    ) -> tuple[Tensor, ...]:
        """[N, H/tp2], int32 [N] -> as of `LossHead`, but of each the rows' sum times a weight.

        Args:
            weight: one over the rows that count, float32 scalar. Of those of the global batch over
                its runs of the head, so that the mean over these is the batch's.
        """
        return self.summed([loss * weight for loss in self.losses(x, labels, "sum", IGNORED)])


class TokenLossHead(LossHead):
    """Cross entropy of each next word by itself, for evaluation."""

    # [N, H/tp2] identical over tp1, int32 [N]
    def build(self, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """[N, H/tp2], int32 [N] -> float32 [N], identical over tp1 and tp2."""
        return self.summed(self.losses(x, labels, "none"))


class ScoreHead(LossHead):
    """Cross entropy of each next word, and whether it is the likeliest one."""

    # [N, H/tp2] identical over tp1, int32 [N]
    def build(self, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """[N, H/tp2], int32 [N] -> float32 [N], int32 [N] of ones and zeros, both identical over
        tp1 and tp2.
        """
        tp1, first = self.layout.tp1, self.first_class()
        logits = self.logits(x, first)
        own = labels if first is None else labels - first
        losses = cross_entropy_sharded_loss(logits, own, replica_grouping=tp1, reduction="none")
        best = ops.argmax(logits, dim=1)
        if first is not None:
            top = ops.max(logits, axis=1)
            is_top = ops.equal(top, ops.collectives.replicated_all_reduce(top, "max", tp1))
            none = popxl.constant(self.model.vocabulary_size, popxl.int32)
            best = ops.where(is_top, best + first, none)
            # of equal ones the first, as on one replica
            best = ops.collectives.replicated_all_reduce(best, "min", tp1)
        return losses, ops.cast(ops.equal(best, labels), popxl.int32)


class LogitsHead(Head):
    """Logits of chosen rows, for generation and evaluation."""

    def build(self, x: Tensor, rows: Tensor) -> Tensor:  # [N, H/tp2] identical over tp1, int32 [R]
        """[N, H/tp2], int32 [R] -> float32 [R, V/tp1]."""
        return self.logits(ops.gather(x, rows), self.first_class())
