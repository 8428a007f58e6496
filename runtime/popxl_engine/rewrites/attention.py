"""Softmax attention and its gradient: from queries, keys and values to results without scores in
memory.
"""

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch

from popxl_engine import native
from popxl_engine.kernels import generator
from popxl_engine.kernels.linalg import product
from popxl_engine.kernels.random import threshold
from popxl_engine.rewrites.match import fused, kernel_like
from popxl_engine.rewrites.products import scores

SWAPPED = (0, 1, 3, 2)
Seed = Optional[torch.Tensor]


def attention(
    query: torch.Tensor,
    key_t: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    seed_tensor: Seed,
    p: float,
) -> Tuple[torch.Tensor, ...]:
    """softmax(query @ key_t * scale + mask), with a seed also what dropout leaves of it, and the
    product with value.

    Shapes: query [b, h, q, d], key_t [b, h, d, s], value [b, h, s, d], mask [q, s] -> [b, h, q, s]
    (twice with a seed), [b, h, q, d].
    """
    return attend(query, key_t, value, mask, scale, seed_tensor, p)


def attend(
    query: torch.Tensor,
    key_t: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    seed_tensor: Seed,
    p: float,
    keeps_shares: bool = True,
) -> Tuple[torch.Tensor, ...]:
    """`attention`, or the last of its results alone, in the same bits."""
    key = key_t.transpose(2, 3)
    if not (
        _has_rows(query, key, value) and mask.is_contiguous() and _draws_in_pairs(key, seed_tensor)
    ):
        results = _attention_by_parts(query, key_t, value, mask, scale, seed_tensor, p)
        return results if keeps_shares else results[-1:]
    sizes, y = (*query.shape[:3], key.shape[2], query.shape[3]), _result_for(query)
    shares = [
        query.new_empty(sizes[:4]) for _ in range(keeps_shares * (1 + (seed_tensor is not None)))
    ]
    probabilities, dropped, *_ = *shares, None, None
    views, rest = _views(query, key, value), (*_views(y), *sizes, *_dropout(seed_tensor, p))
    native.call("attend", (query.dtype,), *views, mask, scale, probabilities, dropped, *rest)
    return (*shares, y)


class Operands(NamedTuple):
    """What `attention_grad` takes."""

    dy: torch.Tensor
    query_t: torch.Tensor
    key: torch.Tensor
    value_t: torch.Tensor
    probabilities: Optional[torch.Tensor]
    factors: Optional[torch.Tensor]
    scale: float
    seed_tensor: Seed
    p: float
    mask: Optional[torch.Tensor]

    @property
    def query(self) -> torch.Tensor:
        """[b, h, q, d]."""
        return self.query_t.transpose(2, 3)

    @property
    def value(self) -> torch.Tensor:
        """[b, h, s, d]."""
        return self.value_t.transpose(2, 3)


def attention_grad(
    dy: torch.Tensor,
    query_t: torch.Tensor,
    key: torch.Tensor,
    value_t: torch.Tensor,
    probabilities: Optional[torch.Tensor],
    factors: Optional[torch.Tensor],
    scale: float,
    seed_tensor: Seed,
    p: float,
    mask: Optional[torch.Tensor] = None,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients for query, key_t and value of `attention`; ``factors`` is what was multiplied with
    value.

    The mask may be left out; where it hides keys, ``factors`` must be zero. The seed may be left
    out where ``factors`` is what dropout has left of ``probabilities``. With mask and seed, these
    two may be left out and are computed again.
    """
    operands = Operands(
        dy, query_t, key, value_t, probabilities, factors, scale, seed_tensor, p, mask
    )
    if not takes_gradient(operands):
        return gradient_by_parts(operands)
    places = [_result_for(t) for t in (operands.query, key, operands.value)]
    write_gradient(places, operands)
    return places[0], places[1].transpose(2, 3), places[2]


def takes_gradient(o: Operands) -> bool:
    """Whether `write_gradient` can work on these."""
    needed = (o.mask,) if o.probabilities is None else (o.probabilities, o.factors)
    is_ordered = all(t is not None and t.is_contiguous() for t in needed)
    return (
        is_ordered
        and _has_rows(o.dy, o.query, o.key, o.value)
        and _draws_in_pairs(o.key, o.seed_tensor)
    )


def write_gradient(places: Sequence[torch.Tensor], o: Operands) -> None:
    """`attention_grad` into three [b, h, n, d] whose last axis lies side by side, for query, key
    and value.
    """
    sizes = (*o.query.shape[:3], o.key.shape[2], o.query.shape[3])
    recomputes = o.probabilities is None
    drops_again = recomputes and o.seed_tensor is not None
    scratch = o.dy.new_empty(native.scratch("attend_grad", *sizes[2:4], recomputes, drops_again))
    views, rest = (
        _views(o.dy, o.query, o.key, o.value),
        (*_views(*places), *sizes, *_dropout(o.seed_tensor, o.p)),
    )
    mask = o.mask if o.mask is not None and o.mask.is_contiguous() else None
    native.call(
        "attend_grad",
        (o.dy.dtype,),
        *views,
        o.probabilities,
        o.factors,
        mask,
        o.scale,
        *rest,
        scratch,
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


def _views(*tensors: torch.Tensor) -> List[Any]:
    """Each tensor, and its strides but the last."""
    return [part for t in tensors for part in (t, *t.stride()[:3])]


def _dropout(seed_tensor: Seed, p: float) -> Tuple[Any, ...]:
    """Keys of the generator, how many, the least draw that is kept, and the factor for what is
    kept.
    """
    if seed_tensor is None:
        return None, 0, 0, 1 / (1 - p)
    keys = generator.key(seed_tensor.reshape(-1, 2))
    return keys, keys.numel(), threshold(p), 1 / (1 - p)


def _in_rows(t: torch.Tensor) -> torch.Tensor:
    """[b, h, n, d] whose heads follow one another in memory: else torch copies it for each product,
    turned or not.
    """
    return t if t.shape[0] == 1 and t.stride(3) == 1 else t.contiguous()


def _attention_by_parts(
    query: torch.Tensor,
    key_t: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    seed_tensor: Seed,
    p: float,
) -> Tuple[torch.Tensor, ...]:
    shares = _shares_by_parts(query, key_t, mask, scale, seed_tensor, p)
    return (*shares, product(shares[-1], _in_rows(value), value.dtype))


def _shares_by_parts(
    query: torch.Tensor,
    key_t: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    seed_tensor: Seed,
    p: float,
) -> Tuple[torch.Tensor, ...]:
    """Probabilities; with a seed also what dropout leaves of them."""
    query, key_t = _in_rows(query), _in_rows(key_t.transpose(2, 3)).transpose(2, 3)
    probabilities = kernel_like("softmax", query)(scores(query, key_t, mask, scale), -1)
    if seed_tensor is None:
        return (probabilities,)
    return probabilities, kernel_like("dropout", query)(probabilities, seed_tensor, p)


def gradient_by_parts(o: Operands) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`attention_grad` op by op."""
    if o.probabilities is None:
        assert o.mask is not None, "what is made again needs its mask"
        shares = _shares_by_parts(
            o.query, o.key.transpose(2, 3), o.mask, o.scale, o.seed_tensor, o.p
        )
        o = o._replace(probabilities=shares[0], factors=shares[-1], seed_tensor=None)
    assert o.probabilities is not None and o.factors is not None
    dy, query_t = _in_rows(o.dy), _in_rows(o.query).transpose(2, 3)
    key, value_t = _in_rows(o.key), _in_rows(o.value).transpose(2, 3)
    d = product(dy, value_t, dy.dtype)
    d_value = product(o.factors.transpose(2, 3), dy, dy.dtype)
    if o.seed_tensor is not None:
        d = kernel_like("dropout", dy)(d, o.seed_tensor, o.p)
    elif o.p:
        d = torch.where(o.factors == 0, 0, d * (1 / (1 - o.p)))
    d = kernel_like("softmax_grad", dy)(d, o.probabilities, -1).mul_(o.scale)
    return product(d, key, dy.dtype), product(query_t, d, dy.dtype), d_value


ATTENTION, GRADIENT = fused(attention), fused(attention_grad)
