"""Softmax attention and its gradient, with probabilities in memory or without.

b batch, h heads, q queries, s keys, d size of a head. Keys come transposed, as the product with
queries takes them; so do queries and values for the gradient.
"""

from typing import Any

from popxl import dtypes
from popxl.op_records import Cost
from popxl.ops.attention import seen, softcap_flops
from popxl.tensor import TensorSpec

from popxl_engine.ops.definition import check, flops_of, fused_op
from popxl_engine.ops.gemm import masked_scores_cost

Spec = TensorSpec
ALIGNMENT = 16
"""Bytes that a GPU's flash kernels read at once: a head is a multiple of them, and every row begins
on such a boundary.
"""


def _probs_flops(
    probs: Spec, query: Spec, key_t: Spec, scale: float, p: float, softcap: float = 0.0
) -> int:
    """Scores with scale and mask, their softmax, and dropout where there is one."""
    flops = masked_scores_cost(probs, query, key_t, probs, scale).flops
    flops += flops_of("softmax", probs, probs, 3) + softcap_flops(probs, softcap)
    return flops + (flops_of("dropout", probs, probs, probs, p) if p else 0)


def _check_forward(name: str, query: Spec, key_t: Spec, value: Spec) -> Spec:
    """The probabilities' spec."""
    fits = query.rank == key_t.rank == value.rank == 4
    fits = fits and query.shape[:2] == key_t.shape[:2] == value.shape[:2]
    fits = fits and query.shape[3] == key_t.shape[2] == value.shape[3]
    fits = fits and key_t.shape[3] == value.shape[2]
    check(
        fits and query.dtype is key_t.dtype is value.dtype,
        name,
        "[b, h, q, d], [b, h, d, s] and [b, h, s, d] of one dtype",
        query=query,
        key_t=key_t,
        value=value,
    )
    return TensorSpec((*query.shape[:3], key_t.shape[3]), query.dtype)


def _check_hiding(
    name: str, probs: Spec, mask: Spec | None, positions: Spec | None, causal: bool
) -> None:
    fits = mask is None or mask.shape == probs.shape[2:] and mask.dtype is probs.dtype
    check(fits, name, f"a mask {list(probs.shape[2:])} of the queries' dtype", mask=mask)
    batch, _, queries, keys = probs.shape
    fits = not causal or mask is None and queries <= keys
    check(fits, name, "no mask, and at least as many keys as queries, for causal ones", probs=probs)
    fits = positions is None or causal and positions.nelms == batch * queries
    expected = f"positions of {batch} * {queries} causal queries"
    check(fits, name, expected, positions=positions)


def attention_cost(
    results: Any,
    query: Spec,
    key_t: Spec,
    value: Spec,
    mask: Spec | None,
    scale: float,
    seed_tensor: Spec | None,
    p: float,
    positions: Spec | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
) -> Cost:
    """Probabilities, dropout with a seed, and the product with values."""
    probs = seen(query, key_t.shape[3], window)
    draws = 0.0 if seed_tensor is None else p
    flops = _probs_flops(probs, query, key_t, scale, draws, softcap)
    return Cost(flops=flops + flops_of("matmul", query, probs, value))


@fused_op(cost=attention_cost, random=True)
def attention(
    query: Spec,
    key_t: Spec,
    value: Spec,
    mask: Spec | None,
    scale: float,
    seed_tensor: Spec | None,
    p: float,
    positions: Spec | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
) -> tuple[TensorSpec, ...]:
    """softmax(query @ key_t * scale + mask), with a seed also what dropout leaves of it, and the
    product with value. What hides keys may be attributes instead of a mask, and scores may have a
    soft bound, as of `popxl.extensions.attention`.

    Shapes: query [b, h, q, d], key_t [b, h, d, s], value [b, h, s, d], mask [q, s], positions b * q
    in order -> [b, h, q, s] (twice with a seed), [b, h, q, d].
    """
    probs = _check_forward("attention", query, key_t, value)
    _check_hiding("attention", probs, mask, positions, causal)
    kept = (probs,) if seed_tensor is None else (probs, probs)
    return (*kept, query)


@fused_op(cost=attention_cost, random=True)
def attention_no_probs(
    query: Spec,
    key_t: Spec,
    value: Spec,
    mask: Spec | None,
    scale: float,
    seed_tensor: Spec | None,
    p: float,
    positions: Spec | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
) -> TensorSpec:
    """The last result of `attention`, in the same bits."""
    probs = _check_forward("attention_no_probs", query, key_t, value)
    _check_hiding("attention_no_probs", probs, mask, positions, causal)
    return query


def attention_grad_cost(  # noqa: PLR0913 - the op takes them
    results: Any,
    dy: Spec,
    query_t: Spec,
    key: Spec,
    value_t: Spec,
    probs: Spec | None,
    dropped_probs: Spec | None,
    scale: float,
    seed_tensor: Spec | None,
    p: float,
    mask: Spec | None = None,
    positions: Spec | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
) -> Cost:
    """Four products, the gradients of dropout and softmax, and the scaling.

    That of dropout counts as one, draws included, even where `dropped_probs` shows what was
    dropped. Probabilities that are not given are computed again, which counts as in `attention`.
    """
    probs_spec = seen(dy, key.shape[2], window)
    flops = _gradient_flops(probs_spec, dy, value_t, p)
    if softcap:
        product = flops_of("matmul", probs_spec, dy, value_t)
        flops += product + 2 * softcap_flops(probs_spec, softcap)
    if probs is None:
        flops += _probs_flops(probs_spec, dy, value_t, scale, p, softcap)
    return Cost(flops=flops)


def _gradient_flops(probs: Spec, dy: Spec, value_t: Spec, p: float = 0.0) -> int:
    flops = 4 * flops_of("matmul", probs, dy, value_t)  # each has as many terms
    flops += flops_of("softmax_grad", probs, probs, probs, 3) + flops_of("mul", probs)
    return flops + (flops_of("dropout", probs, probs, probs, p) if p else 0)


def _check_gradient(name: str, dy: Spec, query_t: Spec, key: Spec, value_t: Spec) -> Spec:
    """The probabilities' spec."""
    fits = dy.rank == query_t.rank == key.rank == value_t.rank == 4
    fits = fits and dy.shape[:2] == query_t.shape[:2] == key.shape[:2] == value_t.shape[:2]
    fits = fits and dy.shape[2:] == query_t.shape[:1:-1] and key.shape[2:] == value_t.shape[:1:-1]
    fits = fits and dy.shape[3] == key.shape[3]
    check(
        fits and dy.dtype is query_t.dtype is key.dtype is value_t.dtype,
        name,
        "[b, h, q, d], [b, h, d, q], [b, h, s, d] and [b, h, d, s] of one dtype",
        dy=dy,
        query_t=query_t,
        key=key,
        value_t=value_t,
    )
    return TensorSpec((*dy.shape[:3], key.shape[2]), dy.dtype)


def _check_probs(
    name: str,
    probs_spec: Spec,
    probs: Spec | None,
    dropped_probs: Spec | None,
) -> None:
    given = [t for t in (probs, dropped_probs) if t is not None]
    fits = all(t.shape == probs_spec.shape and t.dtype is probs_spec.dtype for t in given)
    check(
        fits and len(given) != 1,
        name,
        f"probs and dropped_probs {probs_spec}, or neither, to compute them again",
        probs=probs,
        dropped_probs=dropped_probs,
    )


@fused_op(cost=attention_grad_cost, random=True)
def attention_grad(  # noqa: PLR0913 - the op takes them
    dy: Spec,
    query_t: Spec,
    key: Spec,
    value_t: Spec,
    probs: Spec | None,
    dropped_probs: Spec | None,
    scale: float,
    seed_tensor: Spec | None,
    p: float,
    mask: Spec | None = None,
    positions: Spec | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    """Gradients for query, key_t and value of `attention`; ``dropped_probs`` is what was multiplied
    with value.

    What hides keys may be left out; where it hides some, ``dropped_probs`` must be zero. The seed
    may be left out where ``dropped_probs`` is what dropout has left of ``probs``. With what hides
    keys and seed, these two may be left out and are computed again.

    Shapes: dy [b, h, q, d], query_t [b, h, d, q], key [b, h, s, d], value_t [b, h, d, s], probs and
    dropped_probs [b, h, q, s], mask [q, s] -> [b, h, q, d], [b, h, d, s], [b, h, s, d].
    """
    probs_spec = _check_gradient("attention_grad", dy, query_t, key, value_t)
    _check_probs("attention_grad", probs_spec, probs, dropped_probs)
    _check_hiding("attention_grad", probs_spec, mask, positions, causal)
    return dy, value_t, key


@fused_op(cost=attention_grad_cost, random=True)
def attention_grad_packed(  # noqa: PLR0913 - the op takes them
    dy: Spec,
    query_t: Spec,
    key: Spec,
    value_t: Spec,
    probs: Spec | None,
    dropped_probs: Spec | None,
    scale: float,
    seed_tensor: Spec | None,
    p: float,
    mask: Spec | None = None,
    positions: Spec | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
) -> TensorSpec:
    """`attention_grad` of n queries and n keys: rows of the three gradients, side by side.

    Shapes: as there -> [b * n, 3 * h * d].
    """
    probs_spec = _check_gradient("attention_grad_packed", dy, query_t, key, value_t)
    _check_probs("attention_grad_packed", probs_spec, probs, dropped_probs)
    _check_hiding("attention_grad_packed", probs_spec, mask, positions, causal)
    batch, heads, queries, width = dy.shape
    fits = queries == key.shape[2]
    check(fits, "attention_grad_packed", "as many queries as keys", dy=dy, key=key)
    return TensorSpec((batch * queries, 3 * heads * width), dy.dtype)


def flash_attention_cost(results: Any, query: Spec, key_t: Spec, value: Spec, scale: float) -> Cost:
    """The cost of `attention`; hidden keys count, though kernels skip them."""
    probs = TensorSpec((*query.shape[:3], key_t.shape[3]), query.dtype)
    flops = _probs_flops(probs, query, key_t, scale, 0.0)
    return Cost(flops=flops + flops_of("matmul", query, probs, value))


@fused_op(cost=flash_attention_cost)
def flash_attention(
    query: Spec, key_t: Spec, value: Spec, scale: float
) -> tuple[TensorSpec, TensorSpec]:
    """softmax(query @ key_t * scale) @ value over the keys up to each query's own; and what the
    gradient needs.

    Shapes: query and value [b, h, s, d], key_t [b, h, d, s] -> [b, h, s, d]; float32 [b, h, s], the
    log-sum-exp of each query's scores, which a kernel may lengthen.
    Source: Dao 2023, "FlashAttention-2", arXiv:2307.08691; for float32 Rabe and Staats 2021,
    arXiv:2112.05682.
    """
    probs = _check_forward("flash_attention", query, key_t, value)
    fits = probs.shape[2] == probs.shape[3]
    fits = fits and query.shape[3] * query.dtype.itemsize % ALIGNMENT == 0
    expected = f"as many queries as keys, and heads of a multiple of {ALIGNMENT} bytes"
    check(fits, "flash_attention", expected, query=query, key_t=key_t)
    return query, TensorSpec(query.shape[:3], dtypes.float32)


def flash_attention_grad_cost(
    results: Any, dy: Spec, query_t: Spec, key: Spec, value_t: Spec, *rest: Any
) -> Cost:
    """The cost of `attention_grad` with probabilities; that kernels compute these again does not
    count.
    """
    probs = TensorSpec((*dy.shape[:3], key.shape[2]), dy.dtype)
    return Cost(flops=_gradient_flops(probs, dy, value_t))


@fused_op(cost=flash_attention_grad_cost)
def flash_attention_grad(
    dy: Spec,
    query_t: Spec,
    key: Spec,
    value_t: Spec,
    y: Spec,
    logsumexp: Spec,
    scale: float,
) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    """Gradients for query, key_t and value of `flash_attention`; the same bits every time.

    Shapes: dy, key and y [b, h, s, d], query_t and value_t [b, h, d, s], logsumexp [b, h, s] ->
    [b, h, s, d], [b, h, d, s], [b, h, s, d].
    """
    _check_gradient("flash_attention_grad", dy, query_t, key, value_t)
    fits = y.shape == dy.shape and logsumexp.shape == dy.shape[:3]
    check(fits, "flash_attention_grad", "the results of flash_attention", y=y, logsumexp=logsumexp)
    return dy, value_t, key
