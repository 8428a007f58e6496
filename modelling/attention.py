"""Causal self-attention.

B micro-batch, S sequence, H hidden size, h heads per tp1 replica, k of keys and values, D head
size. tp1, tp2: replica groups.
"""

import math
from typing import Any, ClassVar

import popxl
import popxl_addons as addons
from popxl import Tensor, TensorByRef, ops
from popxl.transforms.autodiff import GradGraphInfo

from popxl_gpt.config.schema import Model
from popxl_gpt.modelling.layer import Layer
from popxl_gpt.modelling.layout import Layout
from popxl_gpt.modelling.linear import Linear
from popxl_gpt.modelling.norm import HeadNorm
from popxl_gpt.modelling.parameters import Table, nested
from popxl_gpt.modelling.rotary import Tables, rotary_tables
from popxl_gpt.modelling.short_convolution import CachedShortConvolution, ShortConvolution
from popxl_gpt.modelling.value_embedding import ValueEmbedding
from popxl_gpt.utils.runtime import attention, rotary


class Attention(Layer):
    """Multi-head attention; heads are split over tp1. Queries, keys and values may go through a
    short convolution, and the query sequence may be worked off in pieces.

    Source: Ainslie et al. 2023, arXiv:2305.13245 (keys and values that several queries share).
    """

    convolution_type: ClassVar[type[ShortConvolution]] = ShortConvolution

    def __init__(self, model: Model, layout: Layout):
        super().__init__(model, layout, self.parameters(model))
        qkv, output = self._tables(model)
        self.qkv = Linear(model, layout, qkv, "tp2 to tp1")
        self.output = Linear(model, layout, output, "tp1 to tp2")
        if model.has_convolutions:
            self.convolution = self.convolution_type(model, layout, self._convolution(model))
        if model.qk_norm:
            self.query_norm = HeadNorm(model, layout, model.heads)
            self.key_norm = HeadNorm(model, layout, model.key_value)
        if model.value_embeddings:
            self.value_embedding = ValueEmbedding(model, layout)

    @staticmethod
    def parameters(model: Model) -> Table:
        """Projections to query, key and value side by side, and out of the heads; what else is in
        between.
        """
        qkv, output = Attention._tables(model)
        others = {}
        if model.has_convolutions:
            others["convolution"] = Attention._convolution(model)
        if model.qk_norm:
            others["query_norm"] = HeadNorm.parameters(model, model.heads)
            others["key_norm"] = HeadNorm.parameters(model, model.key_value)
        if model.value_embeddings:
            others["value_embedding"] = ValueEmbedding.parameters(model)
        return nested(qkv=qkv, output=output, **others)

    @staticmethod
    def _tables(model: Model) -> "tuple[Table, Table]":
        hidden, std = model.hidden_size, model.initial_std
        width, blocks = Attention._side_by_side(model)
        return (
            Linear.parameters(
                model,
                (hidden, width),
                "tp2 to tp1",
                std=std,
                blocks=blocks,
                heads=model.key_value,
                has_bias=model.has_qkv_biases,
            ),
            Linear.parameters(
                model, (model.attention_width, hidden), "tp1 to tp2", std=residual_std(model)
            ),
        )

    @staticmethod
    def _convolution(model: Model) -> Table:
        width, blocks = Attention._side_by_side(model)
        return ShortConvolution.parameters(model, width, tp1_axis=1, blocks=blocks)

    @staticmethod
    def _side_by_side(model: Model) -> "tuple[int, tuple[int, ...]]":
        """Features of queries, keys and values, and their shares."""
        shared = model.heads // model.key_value  # queries of a key
        return (model.heads + 2 * model.key_value) * model.head_width, (shared, 1, 1)

    # [B*S, H/tp2], identical over tp1
    def build(
        self,
        x: Tensor,
        seed: Tensor | None = None,
        positions: Tensor | None = None,
        words: Tensor | None = None,
    ) -> Tensor:
        """[B*S, H/tp2] -> [B*S, H/tp2], identical over tp1. Without a seed nothing is dropped.

        Args:
            positions: of tokens in their documents, int32 [B*S]: each sees its own alone.
            words: the tokens, int32 [B*S], for value embeddings.
        """
        sequence = self.model.sequence_length
        tables = self._rotary_tables(sequence)
        # [B, h, S, D] and twice [B, k, S, D]
        query, key, value = self._query_key_value(x, sequence, tables, words, positions)
        if self.model.dropout == 0.0:
            seed = None
        # probabilities are split over tp1 and identical over tp2, and so are their masks
        if seed is not None:
            seed = self.seed_over(seed, self.layout.tp1, "tp1_position")
        if positions is not None:
            positions = positions.reshape((-1, 1, sequence, 1))
        key, value = (_repeated(t, query.shape[1]) for t in (key, value))  # [B, h, S, D]
        return self._join_heads(self._attend(query, key, value, seed, positions))

    def _rotary_tables(self, positions: int) -> Tables | None:
        """The tables of so many positions, where queries and keys turn.

        Positions in a whole sequence serve documents, too: what counts is how far a key is from a
        query.
        """
        if not self.model.turns:
            return None
        return rotary_tables(self.model, positions, self.dtype)

    def _query_key_value(
        self,
        x: Tensor,
        sequence: int,
        tables: Tables | None,
        words: Tensor | None,
        *of_convolution: Tensor | None,
    ) -> "tuple[Tensor, Tensor, Tensor]":
        """[B*S, H/tp2] -> [B, h, S, D] and two of [B, k, S, D], identical over tp2.

        Args:
            of_convolution: what it takes beside queries, keys and values.
        """
        qkv = self.qkv(x)  # [B*S, (h+2*k)*D], identical over tp2
        if self.model.has_convolutions:
            qkv = self.convolution(qkv, *of_convolution)
        shared = self.model.heads // self.model.key_value
        unit = qkv.shape[1] // (shared + 2)
        query, key, value = ops.split(qkv, [shared * unit, unit, unit], axis=1)
        if self.model.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        if tables is not None:
            size = self.model.head_width
            query, key = (rotary(t, *tables, size=size) for t in (query, key))
        if words is not None:
            value = self.value_embedding(value, words)
        query, key, value = (self._split_heads(t, sequence) for t in (query, key, value))
        return query, key, value

    def _join_heads(self, y: Tensor) -> Tensor:
        """What heads found, through the output projection: [B, h, S, D] -> [B*S, H/tp2]."""
        batch, heads, sequence, head_size = y.shape
        # [B*S, h*D]
        rows = y.transpose((0, 2, 1, 3)).reshape((batch * sequence, heads * head_size))
        return self.output(rows)

    def _split_heads(self, t: Tensor, sequence: int) -> Tensor:
        """[B*S, h*D] -> [B, h, S, D]."""
        head_size = self.model.head_width
        return t.reshape((-1, sequence, t.shape[1] // head_size, head_size)).transpose((0, 2, 1, 3))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seed: Tensor | None,
        positions: Tensor | None,
    ) -> Tensor:
        """A call of a graph for each piece of the queries, over the keys up to its end. See
        `recomputing_gradients`.
        """
        pieces = self.model.attention_serialisation
        if pieces == 1:
            return self._attend_in_graph(query, key, value, seed, positions)
        queries = ops.split(query, pieces, axis=2)  # [B, h, S/pieces, D]
        seeds = (None,) * pieces if seed is None else ops.split_random_seed(seed, pieces)
        length = query.shape[2] // pieces
        results: list[Tensor] = []
        for number, (piece, piece_seed) in enumerate(zip(queries, seeds)):
            first, end = number * length, (number + 1) * length
            keys, values = key[:, :, :end], value[:, :, :end]
            own = None if positions is None else positions[:, :, first:end]
            results.append(self._attend_in_graph(piece, keys, values, piece_seed, own))
        return ops.concat(results, axis=2)

    def _attend_in_graph(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seed: Tensor | None,
        positions: Tensor | None,
    ) -> Tensor:
        graph = popxl.gir().create_graph(attend, query, key, value, seed, positions, self.model)
        optional = [t for t in (seed, positions) if t is not None]
        (y,) = ops.call(graph, query, key, value, *optional)
        return y


class CachedAttention(Attention):
    """Attention of some tokens of each sequence over those before, whose keys and values are kept.

    C tokens of each sequence come at a time, R rows of each are kept, and K keys are seen: those of
    the rows, or beside these the tokens' own.
    """

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
        """[B*C, H/tp2] -> [B*C, H/tp2], identical over tp1. Writes the tokens' own keys and values.

        Args:
            keys, values: [B, k, R, D], identical over tp2.
            mask: what is added to scores, [B, 1, C, K].
            first: the first token's column, int32 scalar.
            rows: of the first token's key, int32 [1]; or, where K = R + C, of all keys the R that
                are kept.
            columns: of a sequence, at most.
            words: the tokens, int32 [B*C], for value embeddings.
            positions, before: where the model has convolutions, as of `CachedShortConvolution`.
        """
        column, tokens = first.reshape((1,)), mask.shape[2]
        tables = self._rotary_tables(columns)
        if tables is not None:
            sin, cos = (ops.dynamic_slice(t, column, [0], [tokens], True) for t in tables)
            tables = sin, cos
        # [B, h, C, D] and twice [B, k, C, D]
        query, key, value = self._query_key_value(x, tokens, tables, words, positions, *before)
        pairs = ((keys, key), (values, value))
        keys, values = (_with_own(kept, own, rows, mask.shape[3]) for kept, own in pairs)
        # queries that share a key stand one after the other: keys are read as they are
        batch, heads, shared = query.shape[0], keys.shape[1], query.shape[1] // keys.shape[1]
        queries = query.reshape((batch, heads, shared * tokens, query.shape[3]))
        mask = mask if shared == 1 else ops.concat([mask] * shared, axis=2)
        y = attention(queries, keys, values, mask=mask, **_scores(self.model))
        return self._join_heads(y.reshape(query.shape))


def _with_own(kept: TensorByRef, own: Tensor, rows: Tensor, count: int) -> Tensor:
    """Keys or values that are seen, so many, of those kept and the tokens' own, which are kept."""
    if kept.shape[2] == count:
        return ops.dynamic_update_(kept, rows, own, [2], [own.shape[2]], True)
    every = ops.concat([kept, own], axis=2)
    ops.var_updates.copy_var_update_(kept, ops.gather(every, rows, axis=2))
    return every


def _repeated(t: Tensor, heads: int) -> Tensor:
    """Keys or values for each head of queries: [B, k, S, D] -> [B, h, S, D]."""
    batch, own, sequence, size = t.shape
    if own == heads:
        return t
    copies = [t.reshape((batch, own, 1, sequence, size))] * (heads // own)
    return ops.concat(copies, axis=2).reshape((batch, heads, sequence, size))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seed: Tensor | None,
    positions: Tensor | None,
    model: Model,
) -> Tensor:  # [B, h, Q, D], twice [B, h, S, D], int32 [B, 1, Q, 1]
    """Softmax attention of the last Q of S tokens over those up to each, or as many as are in a
    window -> [B, h, Q, D].
    """
    hiding: dict[str, Any] = {"causal": True, "window": model.window, "positions": positions}
    return attention(query, key, value, seed, model.dropout, **hiding, **_scores(model))


def _scores(model: Model) -> "dict[str, Any]":
    """How scores are scaled and bounded."""
    return {"scale": model.score_scale, "softcap": model.score_softcap}


def recomputing_gradients(graph: popxl.Graph) -> "dict[popxl.Graph, GradGraphInfo]":
    """Gradients of the attention graphs that a graph calls, by graph, to hand to its autodiff.

    They compute probabilities again, so that none are kept, and only those of one piece exist at a
    time. Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
    Models", section 5.
    """
    gradients = {}
    for called in graph.called_graphs:
        named, query_key_value = addons.GraphWithNamedArgs(called), called.inputs[:3]
        grad = addons.autodiff(
            named, grads_provided=called.outputs[:1], grads_required=query_key_value
        )
        gradients[called] = addons.recompute_graph(grad).grad_graph_info
    return gradients


def residual_std(model: Model) -> float:
    """Standard deviation of fresh projections into the residual stream.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3:
    there are two such projections per layer, and their sum is to have the variance of one. Residual
    branches that start at zero: Goyal et al. 2017, arXiv:1706.02677, section 5.1.
    """
    return 0.0 if model.zero_init_residual else model.initial_std / math.sqrt(2 * model.layers)
