"""Softmax attention and its gradient as compositions that define them, every step rounded; and the
attention of few queries.
"""

import torch

from popxl_engine.kernels.attention import (
    Hiding,
    Seed,
    empty_statistics,
    has_rows,
    views,
    write_statistics,
)
from popxl_engine.kernels.linalg import product
from popxl_engine.kernels.registry import kernel, kernel_like
from popxl_engine.native import library as native


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
    scores = _composed_scores(query, key_t, mask, scale, positions, causal, window, softcap)
    probs = kernel_like("softmax", scores)(scores, -1)
    if seed_tensor is None:
        return probs, product(probs, value, value.dtype)
    dropped = kernel_like("dropout", probs)(probs, seed_tensor, p)
    return probs, dropped, product(dropped, value, value.dtype)


def _composed_scores(
    query: torch.Tensor,
    key_t: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    positions: torch.Tensor | None,
    causal: bool,
    window: int | None,
    softcap: float,
) -> torch.Tensor:
    """Scores as softmax takes them."""
    scores = product(query, key_t, query.dtype).mul_(scale)
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if causal or mask is not None:
        hiding = Hiding(None, positions, causal, window, softcap)
        rows = slice(0, query.shape[2])
        scores.add_(hiding.dense(query, key_t.shape[3], rows) if mask is None else mask)
    return scores


@kernel("attention_with_statistics")
def composed_attention_with_statistics(
    query: torch.Tensor,
    key_t: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    seed_tensor: Seed,
    p: float,
    positions: torch.Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`composed_attention`, and each query's largest score and one over its sum of exponentials."""
    rest = (None, scale, seed_tensor, p, positions, causal, window, softcap)
    *_, y = composed_attention(query, key_t, value, *rest)
    hidden = (None, scale, positions, causal, window, softcap)
    statistics = empty_statistics(query)
    write_statistics(_composed_scores(query, key_t, *hidden), statistics)
    return statistics, y


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
        or not has_rows(query, key, value, mask)
    ):
        return composed_attention(
            query, key_t, value, mask, scale, seed_tensor, p, positions, causal, window, softcap
        )
    probs, y = query.new_empty(sizes), query.new_empty(query.shape)
    operands, hiding = views(query, key, value), mask.expand(sizes)
    rest = (hiding, *hiding.stride()[:3], scale, probs, y, *sizes, query.shape[3])
    native.call("attend_few", (query.dtype,), *operands, *rest)
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


@kernel("attention_with_statistics_grad")
def composed_attention_with_statistics_grad(  # noqa: PLR0913 - the op takes them
    dy: torch.Tensor,
    query_t: torch.Tensor,
    key: torch.Tensor,
    value_t: torch.Tensor,
    y: torch.Tensor,
    statistics: torch.Tensor,
    scale: float,
    seed_tensor: Seed,
    p: float,
    positions: torch.Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`composed_attention_grad` of probabilities that the statistics give."""
    query, key_t = query_t.transpose(2, 3), key.transpose(2, 3)
    hidden = (None, scale, positions, causal, window, softcap)
    scores = _composed_scores(query, key_t, *hidden).to(statistics.dtype)
    shift, factor = statistics.unsqueeze(-1)
    probs = scores.sub_(shift).exp_().mul_(factor).to(dy.dtype)
    dropped = probs
    if seed_tensor is not None:
        dropped = kernel_like("dropout", probs)(probs, seed_tensor, p)
    rest = (scale, seed_tensor, p, positions, causal, window, softcap)
    return composed_attention_grad(dy, query_t, key, value_t, probs, dropped, *rest)
