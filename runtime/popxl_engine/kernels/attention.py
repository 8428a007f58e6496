"""Softmax attention and its gradient in one pass over the heads: scores stay in the cache."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from popxl_engine.kernels import generator
from popxl_engine.kernels.gemm import masked_scores
from popxl_engine.kernels.linalg import product
from popxl_engine.kernels.random import by_seed, threshold
from popxl_engine.kernels.registry import kernel, kernel_like
from popxl_engine.native import library as native

Seed = torch.Tensor | None
BLOCK = 2**26
"""Scores that are held at a time, op by op, as far as 32 queries have no more."""
LONGEST_ROWS = 2**22
"""Scores of a head, at most, that are computed for 32 queries and all keys at a time. Where there
are more, and no tensor as large is there, blocks of queries and keys need linear memory."""


class Hiding(NamedTuple):
    """What is done to scores: a soft bound, if it is not zero, and what hides keys.

    With `causal` the last query's own key is the last key, and later keys are hidden; with a window
    those, too, that lie so far before. positions: int32, of each query of the batch in its
    document; keys that lie further before are hidden.
    """

    mask: torch.Tensor | None
    positions: torch.Tensor | None
    causal: bool
    window: int | None
    softcap: float

    def seen(self, queries: int, keys: int, rows: slice) -> slice:
        """The keys outside of which some of the queries see none."""
        if not self.causal or queries > keys:
            return slice(0, keys)
        first, end = rows.start + keys - queries, rows.stop + keys - queries
        return slice(0 if self.window is None else max(0, first - self.window + 1), end)

    def dense(
        self, query: torch.Tensor, keys: int, rows: slice, seen: slice = slice(None)
    ) -> torch.Tensor:
        """What is added to the scores of some of the queries for some of the keys: [q, s], or [b,
        1, q, s].
        """
        if self.mask is not None:
            return self.mask[rows]
        batch, queries, device = query.shape[0], query.shape[2], query.device
        own = torch.arange(queries, device=device)[rows, None] + keys - queries
        distance = own - torch.arange(keys, device=device)[seen]
        is_hidden = distance < 0 if self.causal else torch.zeros_like(distance, dtype=torch.bool)
        if self.window is not None:
            is_hidden |= distance >= self.window
        if self.positions is not None:
            positions = self.positions.reshape(batch, 1, queries, 1)[:, :, rows]
            is_hidden = is_hidden | (distance > positions)
        return torch.zeros_like(is_hidden, dtype=query.dtype).masked_fill_(is_hidden, -math.inf)

    def is_native(self, query: torch.Tensor, key: torch.Tensor) -> bool:
        """Whether the compiled kernels take this: each query has a key of its own, and nothing is
        hidden in two ways.
        """
        if self.mask is not None:
            return self.mask.is_contiguous() and not self.causal
        is_known = self.causal or self.window is None and self.positions is None
        return is_known and query.shape[2] <= key.shape[2]

    def native(self, query: torch.Tensor, key: torch.Tensor) -> tuple[Any, ...]:
        """What the compiled kernels take."""
        diagonal = key.shape[2] - query.shape[2] if self.causal else -1
        positions = None if self.positions is None else self.positions.contiguous()
        return self.mask, positions, diagonal, self.window or 0, self.softcap


@kernel("fused_attention")
def attention(
    query: torch.Tensor,
    key_t: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    seed_tensor: Seed,
    p: float,
    positions: torch.Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """softmax(query @ key_t * scale + mask), what dropout leaves of it, the product with value."""
    hiding = Hiding(mask, positions, causal, window, softcap)
    return _attend(query, key_t, value, hiding, scale, seed_tensor, p)


def _attend(
    query: torch.Tensor,
    key_t: torch.Tensor,
    value: torch.Tensor,
    hiding: Hiding,
    scale: float,
    seed_tensor: Seed,
    p: float,
    keeps_probs: bool = True,
) -> tuple[torch.Tensor, ...]:
    """`attention`, or the last of its results alone, in the same bits."""
    key = key_t.transpose(2, 3)
    if not (
        _has_rows(query, key, value)
        and hiding.is_native(query, key)
        and _draws_in_pairs(key, seed_tensor)
    ):
        return _attention_op_by_op(query, key_t, value, hiding, scale, seed_tensor, p, keeps_probs)
    sizes, y = (*query.shape[:3], key.shape[2], query.shape[3]), _result_for(query)
    views, rest = _views(query, key, value), (*_views(y), *sizes, *_dropout(seed_tensor, p))
    mask, *hidden = hiding.native(query, key)
    if _is_long(sizes, mask) and not keeps_probs:
        scratch = _scratch("attend_blocks", query, sizes)
        native.call("attend_blocks", (query.dtype,), *views, *hidden, scale, *rest, scratch)
        return (y,)
    kept = [
        query.new_empty(sizes[:4]) for _ in range(keeps_probs * (1 + (seed_tensor is not None)))
    ]
    probs, dropped, *_ = *kept, None, None
    native.call("attend", (query.dtype,), *views, mask, *hidden, scale, probs, dropped, *rest)
    return (*kept, y)


def _is_long(sizes: tuple[int, ...], mask: torch.Tensor | None) -> bool:
    """Whether attention of [batch, heads, queries, keys, ...] goes by blocks of queries and keys,
    if nobody has its probabilities.
    """
    return mask is None and sizes[2] * sizes[3] > LONGEST_ROWS


def _scratch(name: str, t: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """What a function of the library needs beside its operands, by blocks."""
    count = native.scratch(name, (t.dtype,), sizes[0] * sizes[1], *sizes[2:])
    return t.new_empty(count, dtype=torch.float32)


@kernel("fused_attention_no_probs")
def attention_no_probs(
    query: torch.Tensor,
    key_t: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    seed_tensor: Seed,
    p: float,
    positions: torch.Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """The last result of `attention`, in the same bits as far as it is not by blocks."""
    hiding = Hiding(mask, positions, causal, window, softcap)
    (y,) = _attend(query, key_t, value, hiding, scale, seed_tensor, p, keeps_probs=False)
    return y


class Operands(NamedTuple):
    """What `attention_grad` takes."""

    dy: torch.Tensor
    query_t: torch.Tensor
    key: torch.Tensor
    value_t: torch.Tensor
    probs: torch.Tensor | None
    dropped_probs: torch.Tensor | None
    scale: float
    seed_tensor: Seed
    p: float
    hiding: Hiding

    @property
    def query(self) -> torch.Tensor:
        """[b, h, q, d]."""
        return self.query_t.transpose(2, 3)

    @property
    def value(self) -> torch.Tensor:
        """[b, h, s, d]."""
        return self.value_t.transpose(2, 3)


@kernel("fused_attention_grad")
def attention_grad(  # noqa: PLR0913 - the op takes them
    dy: torch.Tensor,
    query_t: torch.Tensor,
    key: torch.Tensor,
    value_t: torch.Tensor,
    probs: torch.Tensor | None,
    dropped_probs: torch.Tensor | None,
    scale: float,
    seed_tensor: Seed,
    p: float,
    mask: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients for query, key_t and value of `attention`."""
    hiding = Hiding(mask, positions, causal, window, softcap)
    operands = Operands(
        dy, query_t, key, value_t, probs, dropped_probs, scale, seed_tensor, p, hiding
    )
    if not _takes_gradient(operands):
        return _gradient_op_by_op(operands)
    results = [_result_for(t) for t in (operands.query, key, operands.value)]
    _write_gradient(results, operands)
    return results[0], results[1].transpose(2, 3), results[2]


@kernel("fused_attention_grad_packed")
def attention_grad_packed(  # noqa: PLR0913 - the op takes them
    dy: torch.Tensor,
    query_t: torch.Tensor,
    key: torch.Tensor,
    value_t: torch.Tensor,
    probs: torch.Tensor | None,
    dropped_probs: torch.Tensor | None,
    scale: float,
    seed_tensor: Seed,
    p: float,
    mask: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """`attention_grad` of n queries and n keys: rows of the gradients, side by side, [b * n, 3 * h
    * d].
    """
    b, h, n, d = dy.shape
    rows = dy.new_empty(b * n, 3 * h * d)
    results = [part.view(b, n, h, d).transpose(1, 2) for part in rows.split(h * d, 1)]
    hiding = Hiding(mask, positions, causal, window, softcap)
    operands = Operands(
        dy, query_t, key, value_t, probs, dropped_probs, scale, seed_tensor, p, hiding
    )
    if _takes_gradient(operands):
        _write_gradient(results, operands)
        return rows
    d_query, d_key_t, d_value = _gradient_op_by_op(operands)
    for result, t in zip(results, (d_query, d_key_t.transpose(2, 3), d_value)):
        result.copy_(t)
    return rows


def _takes_gradient(o: Operands) -> bool:
    """Whether `_write_gradient` can work on these."""
    given = () if o.probs is None else (o.probs, o.dropped_probs)
    is_ordered = all(t is not None and t.is_contiguous() for t in given)
    return (
        is_ordered
        and o.hiding.is_native(o.query, o.key)
        and _has_rows(o.dy, o.query, o.key, o.value)
        and _draws_in_pairs(o.key, o.seed_tensor)
    )


def _write_gradient(results: Sequence[torch.Tensor], o: Operands) -> None:
    """`attention_grad` into three [b, h, n, d] whose last axis lies side by side, for query, key
    and value.
    """
    sizes = (*o.query.shape[:3], o.key.shape[2], o.query.shape[3])
    views = _views(o.dy, o.query, o.key, o.value)
    rest = (*_views(*results), *sizes, *_dropout(o.seed_tensor, o.p))
    mask, *hidden = o.hiding.native(o.query, o.key)
    recomputes = o.probs is None
    if _is_long(sizes, mask) and recomputes:
        scratch = _scratch("attend_blocks_grad", o.dy, sizes)
        native.call("attend_blocks_grad", (o.dy.dtype,), *views, *hidden, o.scale, *rest, scratch)
        return
    drops_again = recomputes and o.seed_tensor is not None
    scratch = o.dy.new_empty(
        native.scratch("attend_grad", (), *sizes[2:4], recomputes, drops_again)
    )
    probs = o.probs, o.dropped_probs
    native.call(
        "attend_grad", (o.dy.dtype,), *views, *probs, mask, *hidden, o.scale, *rest, scratch
    )


def _has_rows(*tensors: torch.Tensor) -> bool:
    """Whether the compiled kernels take these [b, h, n, d]: their last axis lies side by side."""
    return native.attends(*tensors) and all(t.numel() and t.stride(3) == 1 for t in tensors)


def _result_for(t: torch.Tensor) -> torch.Tensor:
    """Memory for a tensor of this shape, with the same order of axes, unless that does not end with
    the last.
    """
    result = torch.empty_like(t)
    return result if result.stride(3) == 1 else t.new_empty(t.shape)


def _draws_in_pairs(key: torch.Tensor, seed_tensor: Seed) -> bool:
    """Whether a row of probabilities begins with the first of two draws, and seeds are for equal
    parts of the batch.
    """
    return seed_tensor is None or (
        key.shape[2] % 2 == 0 and key.shape[0] % (seed_tensor.numel() // 2) == 0
    )


def _views(*tensors: torch.Tensor) -> list[Any]:
    """Each tensor, and its strides but the last."""
    return [part for t in tensors for part in (t, *t.stride()[:3])]


def _dropout(seed_tensor: Seed, p: float) -> tuple[Any, ...]:
    """Keys of the generator, how many, the least draw that is kept, and the factor for what is
    kept.
    """
    if seed_tensor is None:
        return None, 0, 0, 1 / (1 - p)
    keys = generator.key(seed_tensor.reshape(-1, 2))
    return keys, keys.numel(), threshold(p), 1 / (1 - p)


def _in_rows(t: torch.Tensor) -> torch.Tensor:
    """[b, h, n, d] whose heads follow one another in memory: else torch copies it for each product,
    transposed or not.
    """
    return t if t.shape[0] == 1 and t.stride(3) == 1 else t.contiguous()


def _attention_op_by_op(
    query: torch.Tensor,
    key_t: torch.Tensor,
    value: torch.Tensor,
    hiding: Hiding,
    scale: float,
    seed_tensor: Seed,
    p: float,
    keeps_probs: bool = True,
) -> tuple[torch.Tensor, ...]:
    """`_attend` op by op, of some queries after the other."""
    value, blocks = _in_rows(value), []
    for rows, seen in _blocks(
        query, key_t.shape[3], hiding, keeps_probs or seed_tensor is not None
    ):
        kept = _probs_op_by_op(query, key_t, hiding, scale, seed_tensor, p, rows, seen)
        y = product(kept[-1], value[:, :, seen], value.dtype)
        blocks.append((*kept, y) if keeps_probs else (y,))
    return blocks[0] if len(blocks) == 1 else tuple(torch.cat(parts, 2) for parts in zip(*blocks))


def _blocks(
    query: torch.Tensor, keys: int, hiding: Hiding, takes_all: bool
) -> list[tuple[slice, slice]]:
    """The queries whose scores are held together, all, as far as these are few; and the keys that
    they have scores for.

    Args:
        takes_all: whether that is all keys, for somebody sees their probabilities.
    """
    batch, heads, queries, _ = query.shape
    count = max(32, BLOCK // max(1, batch * heads * keys))
    blocks = [slice(n, min(n + count, queries)) for n in range(0, max(1, queries), count)]
    if takes_all or len(blocks) == 1:
        return [(rows, slice(0, keys)) for rows in blocks]
    return [(rows, hiding.seen(queries, keys, rows)) for rows in blocks]


def _probs_op_by_op(
    query: torch.Tensor,
    key_t: torch.Tensor,
    hiding: Hiding,
    scale: float,
    seed_tensor: Seed,
    p: float,
    rows: slice,
    seen: slice,
) -> tuple[torch.Tensor, ...]:
    """Probabilities of some queries for some keys; with a seed also what dropout leaves of them."""
    probs = kernel_like("softmax", query)(_scores(query, key_t, hiding, scale, rows, seen), -1)
    if seed_tensor is None:
        return (probs,)
    return probs, _dropped(probs, seed_tensor, p, query.shape[2], rows)


def _scores(
    query: torch.Tensor,
    key_t: torch.Tensor,
    hiding: Hiding,
    scale: float,
    rows: slice,
    seen: slice,
) -> torch.Tensor:
    """Scores of some queries for some keys, as softmax takes them."""
    mask = hiding.dense(query, key_t.shape[3], rows, seen)
    key_t = _in_rows(key_t.transpose(2, 3)[:, :, seen]).transpose(2, 3)
    query = _in_rows(query[:, :, rows])
    if mask.dim() == 2 and not hiding.softcap:
        return masked_scores(query, key_t, mask, scale)
    return _bounded(query, key_t, hiding, scale).add_(mask).to(query.dtype)


def _bounded(
    query: torch.Tensor, key_t: torch.Tensor, hiding: Hiding, scale: float
) -> torch.Tensor:
    """Scores in float32 or more, before anything is hidden."""
    scores = product(query, key_t, torch.promote_types(query.dtype, torch.float32)).mul_(scale)
    cap = hiding.softcap
    return scores.div_(cap).tanh_().mul_(cap) if cap else scores


def _dropped(
    probs: torch.Tensor, seed_tensor: torch.Tensor, p: float, queries: int, rows: slice
) -> torch.Tensor:
    """What dropout leaves of probabilities, or of their gradients, of some of the queries."""
    if rows.stop - rows.start == queries:
        return kernel_like("dropout", probs)(probs, seed_tensor, p)
    keys, result = probs.shape[3], probs * (1 / (1 - p))
    for seed, part in zip(*by_seed(seed_tensor, result)):
        for i, of_head in enumerate(part.flatten(0, 1)):
            first = (i * queries + rows.start) * keys
            draws = generator.draws(seed, of_head.numel(), first).view(of_head.shape)
            of_head.masked_fill_(draws < threshold(p), 0)
    return result


def _gradient_op_by_op(o: Operands) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`attention_grad` op by op, of some queries after the other."""
    takes_all = o.probs is not None or o.seed_tensor is not None
    blocks, dtype = _blocks(o.query, o.key.shape[2], o.hiding, takes_all), o.dy.dtype
    if len(blocks) == 1:
        return _gradient_of_rows(o, *blocks[0], dtype)
    sums, d_queries = torch.promote_types(dtype, torch.float32), []
    d_key_t, d_value = (
        o.dy.new_zeros(t.shape, dtype=sums) for t in (o.key.transpose(2, 3), o.value)
    )
    for rows, seen in blocks:
        d_query, for_key_t, for_value = _gradient_of_rows(o, rows, seen, sums)
        d_queries.append(d_query)
        d_key_t[..., seen].add_(for_key_t), d_value[:, :, seen].add_(for_value)
    return torch.cat(d_queries, 2), d_key_t.to(dtype), d_value.to(dtype)


def _gradient_of_rows(
    o: Operands, rows: slice, seen: slice, sums: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of some queries, and what they add to those of key_t and value for some keys."""
    probs, dropped, draws = o.probs, o.dropped_probs, o.seed_tensor
    query, cap = _in_rows(o.query[:, :, rows]), o.hiding.softcap
    if probs is None or dropped is None:
        key_t, draws = o.key.transpose(2, 3), None
        kept = _probs_op_by_op(o.query, key_t, o.hiding, o.scale, o.seed_tensor, o.p, rows, seen)
        probs, dropped = kept[0], kept[-1]
    else:
        probs, dropped = probs[:, :, rows], dropped[:, :, rows]
    dy, key = _in_rows(o.dy[:, :, rows]), _in_rows(o.key[:, :, seen])
    value_t = _in_rows(o.value[:, :, seen]).transpose(2, 3)
    d = product(dy, value_t, dy.dtype)
    d_value = product(dropped.transpose(2, 3), dy, sums)
    if draws is not None:
        d = _dropped(d, draws, o.p, o.dy.shape[2], rows)
    elif o.p:
        d = torch.where(dropped == 0, 0, d * (1 / (1 - o.p)))
    d = kernel_like("softmax_grad", dy)(d, probs, -1).mul_(o.scale)
    if cap:
        share = _bounded(query, key.transpose(2, 3), o.hiding, o.scale).div_(cap)
        d = share.square_().neg_().add_(1).mul_(d).to(d.dtype)
    return product(d, key, dy.dtype), product(query.transpose(2, 3), d, sums), d_value


@kernel("attention")
def composed_attention(
    query: torch.Tensor,
    key_t: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    seed_tensor: Seed,
    p: float,
    positions: torch.Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """The composition that defines attention: every step is rounded."""
    scores = product(query, key_t, query.dtype).mul_(scale)
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if causal or mask is not None:
        hiding = Hiding(None, positions, causal, window, softcap)
        rows = slice(0, query.shape[2])
        scores.add_(hiding.dense(query, key_t.shape[3], rows) if mask is None else mask)
    probs = kernel_like("softmax", scores)(scores, -1)
    if seed_tensor is None:
        return probs, product(probs, value, value.dtype)
    dropped = kernel_like("dropout", probs)(probs, seed_tensor, p)
    return probs, dropped, product(dropped, value, value.dtype)


FEW_QUERIES = 8
"""Queries that attend to keys whose reading takes the time: a step of generation."""


@kernel("attention", device="cpu")
def attention_of_few_queries(
    query: torch.Tensor,
    key_t: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    seed_tensor: Seed,
    p: float,
    positions: torch.Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """`composed_attention` in one pass over keys and values, of which none are copied."""
    key, sizes = key_t.transpose(2, 3), (*query.shape[:3], key_t.shape[3])
    if (
        mask is None
        or mask.dim() < 4
        or mask.shape[3] != sizes[3]
        or query.shape[2] > FEW_QUERIES
        or seed_tensor is not None
        or softcap
        or not _has_rows(query, key, value, mask)
    ):
        return composed_attention(
            query, key_t, value, mask, scale, seed_tensor, p, positions, causal, window, softcap
        )
    probs, y = query.new_empty(sizes), query.new_empty(query.shape)
    views, hiding = _views(query, key, value), mask.expand(sizes)
    rest = (hiding, *hiding.stride()[:3], scale, probs, y, *sizes, query.shape[3])
    native.call("attend_few", (query.dtype,), *views, *rest)
    return probs, y


@kernel("attention_grad")
def composed_attention_grad(  # noqa: PLR0913 - the op takes them
    dy: torch.Tensor,
    query_t: torch.Tensor,
    key: torch.Tensor,
    value_t: torch.Tensor,
    probs: torch.Tensor,
    dropped_probs: torch.Tensor,
    scale: float,
    seed_tensor: Seed,
    p: float,
    positions: torch.Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of `composed_attention`, step by step."""
    d = product(dy, value_t, dy.dtype)
    d = d if seed_tensor is None else kernel_like("dropout", d)(d, seed_tensor, p)
    d = kernel_like("softmax_grad", d)(d, probs, -1).mul_(scale)
    if softcap:  # tanh'(x) = 1 - tanh(x)^2
        bounded = product(query_t.transpose(2, 3), key.transpose(2, 3), dy.dtype)
        bounded = bounded.mul_(scale).div_(softcap).tanh_()
        d = d.mul_(1 - bounded.square_())
    d_value = product(dropped_probs.transpose(2, 3), dy, dy.dtype)
    return product(d, key, dy.dtype), product(query_t, d, dy.dtype), d_value
