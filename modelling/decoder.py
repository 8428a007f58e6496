"""Decoder block. N rows (micro_batch * sequence), H hidden size. tp1, tp2: replica groups."""

from typing import ClassVar

from popxl import Tensor, TensorByRef, ops

from popxl_gpt.config.schema import Model
from popxl_gpt.modelling.attention import Attention, CachedAttention
from popxl_gpt.modelling.feed_forward import FeedForward
from popxl_gpt.modelling.layer import Layer
from popxl_gpt.modelling.layout import Layout
from popxl_gpt.modelling.norm import Norm
from popxl_gpt.modelling.parameters import Table, nested
from popxl_gpt.modelling.short_convolution import CachedShortConvolution, ShortConvolution

CONVOLUTIONS = ("attention_convolution", "attention.convolution", "feed_forward_convolution")
"""The short convolutions of a block whose model has them, in the order in which they run."""


class DecoderBlock(Layer):
    """Attention and feed-forward, each behind a norm and, where the model has them, a short
    convolution; each is added to its input. Norms may stand after each in place of before, or as
    well, and both may have one input.

    Sources: OLMo Team 2024, arXiv:2501.00656, section 2.1 (norms after); Gemma Team 2024,
    arXiv:2408.00118, section 2 (both); Wang and Komatsuzaki 2021, "GPT-J-6B" (one input).
    """

    attention_type: ClassVar[type[Attention]] = Attention
    convolution_type: ClassVar[type[ShortConvolution]] = ShortConvolution

    def __init__(self, model: Model, layout: Layout):
        super().__init__(model, layout, self.parameters(model))
        if model.has_norms_before:
            self.attention_norm = Norm(model, layout)
            self.feed_forward_norm = Norm(model, layout)
        self.attention = self.attention_type(model, layout)
        self.feed_forward = FeedForward(model, layout)
        if model.has_norms_after:
            self.attention_output_norm = Norm(model, layout)
            self.feed_forward_output_norm = Norm(model, layout)
        if model.has_convolutions:
            table = self._convolution(model)
            self.attention_convolution = self.convolution_type(model, layout, table)
            self.feed_forward_convolution = self.convolution_type(model, layout, table)

    @staticmethod
    def parameters(model: Model) -> Table:
        """All of one block."""
        tables: dict[str, Table] = {}
        for name, branch in (("attention", Attention), ("feed_forward", FeedForward)):
            if model.has_norms_before:
                tables[f"{name}_norm"] = Norm.parameters(model)
            tables[name] = branch.parameters(model)
            if model.has_norms_after:
                tables[f"{name}_output_norm"] = Norm.parameters(model)
        if model.has_convolutions:
            for name in ("attention_convolution", "feed_forward_convolution"):
                tables[name] = DecoderBlock._convolution(model)
        return nested(**tables)

    @staticmethod
    def _convolution(model: Model) -> Table:
        return ShortConvolution.parameters(model, model.hidden_size, tp2_axis=1)

    # [N, H/tp2], identical over tp1
    def build(
        self,
        x: Tensor,
        seed: Tensor | None = None,
        positions: Tensor | None = None,
        words: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """[N, H/tp2] -> [N, H/tp2], identical over tp1, and what the next block gets beside it.
        Without a seed nothing is dropped.

        Args:
            positions: of tokens in their documents, int32 [N]: each sees its own alone.
            words: the tokens, int32 [N], for value embeddings.
        """
        seeds = (
            (None, None, None)
            if seed is None or self.model.dropout == 0.0
            else ops.split_random_seed(seed, 3)
        )
        y = self._into("attention", x, positions)
        y = self._added("attention", self.attention(y, seeds[0], positions, words))
        attended = x + self.dropout(y, seeds[1], "attention_tp2_position")
        y = self._into("feed_forward", self._input(x, attended), positions)
        y = self._added("feed_forward", self.feed_forward(y))
        x = attended + self.dropout(y, seeds[2], "feed_forward_tp2_position")
        return (x, *(ops.identity(t) for t in (positions, words) if t is not None))

    def _input(self, x: Tensor, attended: Tensor) -> Tensor:
        """The feed-forward layer's, before its norm, of the block's and what has attention's
        added.
        """
        return x if self.model.parallel_branches else attended

    def _into(self, branch: str, x: Tensor, *of_convolution: Tensor | None) -> Tensor:
        """What attention or the feed-forward layer gets."""
        if self.model.has_norms_before:
            x = getattr(self, f"{branch}_norm")(x)
        if self.model.has_convolutions:
            x = getattr(self, f"{branch}_convolution")(x, *of_convolution)
        return x

    def _added(self, branch: str, y: Tensor) -> Tensor:
        """What is added, of what attention or the feed-forward layer gives."""
        return getattr(self, f"{branch}_output_norm")(y) if self.model.has_norms_after else y


class CachedDecoderBlock(DecoderBlock):
    """The block on some tokens of each sequence, with keys and values of those before kept. Drops
    no units.
    """

    attention_type = CachedAttention
    convolution_type = CachedShortConvolution

    def build(  # type: ignore[override]
        self,
        x: Tensor,
        keys: TensorByRef,
        values: TensorByRef,
        mask: Tensor,
        first: Tensor,
        rows: Tensor,
        columns: int,
        words: Tensor | None = None,
        positions: Tensor | None = None,
        before: tuple[TensorByRef, ...] = (),
    ) -> Tensor:
        """[N, H/tp2] -> [N, H/tp2], identical over tp1. Other arguments as of `CachedAttention`.

        Args:
            positions, before: of `CONVOLUTIONS`, as of `CachedShortConvolution`.
        """
        y = self._into("attention", x, positions, *before[:1])
        cached = (keys, values, mask, first, rows, columns)
        y = self.attention(y, *cached, words, positions, before[1:2])
        attended = x + self._added("attention", y)
        y = self._into("feed_forward", self._input(x, attended), positions, *before[2:])
        return attended + self._added("feed_forward", self.feed_forward(y))
