"""Softmax attention as one op with its own gradient. Programs call `popxl.extensions.attention`.

b batch, h heads, q queries, s keys, d size of a head. The ops take keys transposed, as the product
with queries does, and give the probabilities beside the result: the gradient reads them.
"""

import math
from typing import Any

import numpy as np

from popxl import dtypes
from popxl.errors import ShapeError
from popxl.opdef import OPS, Cost, op
from popxl.ops.broadcasting import sum_to
from popxl.ops.checks import check_computes_in_one_dtype, check_floating
from popxl.ops.linalg import matmul
from popxl.ops.normalisation import softmax_grad
from popxl.ops.random import check_rate, check_seeds, dropout
from popxl.ops.shape import transpose
from popxl.tensor import Constant, Tensor, TensorSpec
from popxl.utils import host_array

SWAPPED = (0, 1, 3, 2)
Grads = tuple[Tensor | None, ...]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    seed_tensor: Tensor | None = None,
    p: float = 0.0,
    *,
    window: int | None = None,
    positions: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """dropout(softmax(query @ key.T * scale + mask)) @ value, as one op.

    Each step is rounded to the operands' type. Autodiff keeps the probabilities for the gradient;
    a graph whose gradient is to compute them again goes through
    `popxl_addons.transforms.recompute_graph`: no memory is then quadratic in the sequence.

    Shapes: query [b, h, q, d], key and value [b, h, s, d], of one floating-point type ->
    [b, h, q, d]. Queries may be a piece of a sequence, with their rows of the mask.
    Args:
        mask: what is added to scores, of the operands' type, in a shape that broadcasts to
            [b, h, q, s]. It has a gradient.
        causal: hide from each query the keys after its own, the last query's own being the last
            key.
        scale: default: 1 / sqrt(d).
        seed_tensor: what dropout draws from, uint32 [2] or [n, 2], see `popxl.ops.dropout`.
            Without one nothing is dropped.
        p: probability with which dropout zeroes one of the probabilities.
        window: keys that a causal query sees at most: its own and those just before it.
        positions: of causal queries in their documents, int32 [b, 1, q, 1]: keys that lie further
            before a query than that are hidden.
        softcap: a bound c of scores, which become c * tanh(score / c) before a mask is added; 0:
            none.
    Raises:
        ShapeError: for other shapes.
        ValueError: both mask and causal, window or positions without causal, p outside [0, 1) or
            without a seed, another seed, or a window or softcap that is none.
        DTypeError: from sessions, for several types or one that is not floating point.
    Sources: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1; Beltagy et al. 2020,
    arXiv:2004.05150 (windows); Gemma Team 2024, arXiv:2408.00118 (softcap).
    """
    _check_operands(query, key, value)
    if causal and mask is not None:
        raise ValueError(
            "attention: got both mask and causal; expected one of them. Add -inf to the mask where "
            "a key is to be hidden."
        )
    if seed_tensor is None and p:
        raise ValueError(
            f"attention: got p {p} without a seed; expected both or neither. Pass seed_tensor."
        )
    # sessions refuse integers, which hold no fraction
    dtype = query.dtype if query.dtype.is_floating_point else dtypes.float32
    factor = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    rounded = float(np.asarray(host_array("attention: scale", factor, dtype)))
    key_t = transpose(key, SWAPPED)
    return _attention(
        query, key_t, value, mask, rounded, seed_tensor, p, positions, causal, window, softcap
    )[-1]


def _check_operands(query: Tensor, key: Tensor, value: Tensor) -> None:
    fits = query.rank == key.rank == value.rank == 4 and key.shape == value.shape
    if not fits or query.shape[:2] != key.shape[:2] or query.shape[3] != key.shape[3]:
        raise ShapeError(
            f"attention: got query {query.spec}, key {key.spec} and value {value.spec}; expected "
            "[b, h, q, d] and twice [b, h, s, d]. Reshape or transpose them."
        )


@op(name="attention", random=True, residuals=True, names=lambda **a: _names(a["seed_tensor"]))
def _attention(
    query: Tensor,
    key_t: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    seed_tensor: Tensor | None,
    p: float,
    positions: Tensor | None,
    causal: bool,
    window: int | None,
    softcap: float,
) -> tuple[TensorSpec, ...]:
    """Probabilities, with a seed also what dropout leaves of them, and the result; `attention`
    documents it.
    """
    check_floating("attention", query=query)
    added = {} if mask is None else {"mask": mask}
    check_computes_in_one_dtype("attention", query=query, key=key_t, value=value, **added)
    probs = TensorSpec((*query.shape[:3], key_t.shape[3]), query.dtype)
    if mask is not None:
        _check_mask(mask, probs)
    _check_hiding(probs, positions, causal, window, softcap)
    if seed_tensor is None:
        return probs, query.spec
    check_seeds("attention", "seed_tensor", seed_tensor)
    check_rate("attention", "p", p)
    parts = seed_tensor.nelms // 2
    if query.shape[0] % parts:
        raise ShapeError(
            f"attention: got query {query.spec} and {parts} stacked seeds; expected a batch that "
            f"is a multiple of {parts}. Give one seed for each of its equal parts."
        )
    return probs, probs, query.spec


def _names(seed_tensor: Tensor | None) -> tuple[str, ...]:
    dropped = () if seed_tensor is None else ("dropped_probs",)
    return ("probs", *dropped, "attention")


def _check_mask(mask: Tensor, probs: TensorSpec) -> None:
    try:
        fits = np.broadcast_shapes(mask.shape, probs.shape) == probs.shape
    except ValueError:
        fits = False
    if not fits:
        raise ShapeError(
            f"attention: got mask {mask.spec}; expected a shape that broadcasts to "
            f"{list(probs.shape)}, the scores'. Give [queries, keys], or axes of 1."
        )


def _check_hiding(
    probs: TensorSpec, positions: Tensor | None, causal: bool, window: int | None, softcap: float
) -> None:
    batch, _, queries, keys = probs.shape
    if causal and queries > keys:
        raise ShapeError(
            f"attention: got {queries} causal queries over {keys} keys; expected as many keys as "
            "queries, or more. Give a mask."
        )
    alone = [n for n, a in (("window", window), ("positions", positions)) if a is not None]
    if alone and not causal:
        raise ValueError(
            f"attention: got {alone[0]} without causal; expected both, or neither. Pass "
            "causal=True, or hide keys by a mask."
        )
    if window is not None and window < 1:
        raise ValueError(
            f"attention: got window {window}; expected at least 1, a query's own key, or None for "
            "all keys before it."
        )
    if positions is not None and (
        positions.shape != (batch, 1, queries, 1) or positions.dtype is not dtypes.int32
    ):
        raise ShapeError(
            f"attention: got positions {positions.spec}; expected int32 {[batch, 1, queries, 1]}, "
            "one of each query. Reshape or cast them."
        )
    if not 0 <= softcap < math.inf:
        raise ValueError(
            f"attention: got softcap {softcap}; expected a finite bound of scores, or 0 for none."
        )


@_attention.vjp
def attention_vjp(
    dy: tuple[Tensor, ...],
    y: tuple[Tensor, ...],
    query: Tensor,
    key_t: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    seed_tensor: Tensor | None,
    p: float,
    positions: Tensor | None,
    causal: bool,
    window: int | None,
    softcap: float,
) -> Grads:
    """Gradients from the probabilities; a mask's, unless it is constant, by the composition."""
    probs, dropped = y[0], y[-2]
    value_t = transpose(value, SWAPPED)
    d_query, d_key_t, d_value = attention_grad(
        dy[-1], transpose(query, SWAPPED), transpose(key_t, SWAPPED), value_t, probs, dropped,
        scale, seed_tensor, p, positions, causal, window, softcap,
    )  # fmt: skip
    d_mask = None
    if mask is not None and not isinstance(mask, Constant):
        d = matmul(dy[-1], value_t)
        d = d if seed_tensor is None else dropout(d, seed_tensor, p)
        d = softmax_grad(d, probs, -1)
        new_axes = tuple(range(d.rank - mask.rank))
        d_mask = sum_to(d, mask.shape, new_axes)
    return d_query, d_key_t, d_value, d_mask, None, None


@op(differentiable=False, random=True, names=lambda **a: ("d_query", "d_key_t", "d_value"))
def attention_grad(
    dy: Tensor,
    query_t: Tensor,
    key: Tensor,
    value_t: Tensor,
    probs: Tensor,
    dropped_probs: Tensor,
    scale: float,
    seed_tensor: Tensor | None,
    p: float,
    positions: Tensor | None,
    causal: bool,
    window: int | None,
    softcap: float,
) -> tuple[TensorSpec, ...]:
    """Gradients of `attention` for query, transposed key, and value.

    Shapes: dy [b, h, q, d], query_t [b, h, d, q], key [b, h, s, d], value_t [b, h, d, s], probs and
    dropped_probs, which were multiplied with value, [b, h, q, s] -> [b, h, q, d], [b, h, d, s],
    [b, h, s, d]. What hides keys spares work; a softcap has its own gradient.
    """
    return dy.spec, value_t.spec, key.spec


@_attention.cost
def attention_cost(
    results: Any,
    query: Tensor,
    key_t: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    seed_tensor: Tensor | None,
    p: float,
    positions: Tensor | None,
    causal: bool,
    window: int | None,
    softcap: float,
) -> Cost:
    """Two products, scale and mask, softmax, and dropout with a seed; one product where the result
    is not used.

    Hidden keys count, but for those that a window leaves out.
    """
    probs = seen(query, key_t.shape[3], window)
    products = 1 if results[-1] is None else 2
    return _composed(
        matmul=products * 2 * query.shape[3] * probs.nelms,
        mul=probs.nelms,
        add=probs.nelms,
        softmax=_flops("softmax", probs, probs, 3),
        dropout=0 if seed_tensor is None else _flops("dropout", probs, probs, seed_tensor, p),
        tanh=softcap_flops(probs, softcap),
    )


def seen(query: Any, keys: int, window: int | None) -> TensorSpec:
    """The spec of so many scores as count."""
    return TensorSpec((*query.shape[:3], min(keys, window or keys)), query.dtype)


def softcap_flops(probs: TensorSpec, softcap: float) -> int:
    """A division, tanh and a multiplication of each score."""
    return _flops("tanh", probs, probs) + 2 * probs.nelms if softcap else 0


def _composed(**parts: int) -> Cost:
    """The cost of what several ops do."""
    found = {name: flops for name, flops in parts.items() if flops}
    return Cost(flops=sum(found.values()), parts=found)


def _flops(name: str, result: Any, *operands: Any) -> int:
    rule = OPS[name].cost
    assert rule is not None, name
    return rule(result, *operands).flops


@attention_grad.cost
def attention_grad_cost(
    results: Any,
    dy: Tensor,
    query_t: Tensor,
    key: Tensor,
    value_t: Tensor,
    probs: Tensor,
    dropped_probs: Tensor,
    scale: float,
    seed_tensor: Tensor | None,
    p: float,
    positions: Tensor | None,
    causal: bool,
    window: int | None,
    softcap: float,
) -> Cost:
    """Four products, the gradients of dropout and softmax, and the scaling; with a softcap one more
    product, and as many steps as that and its gradient take.
    """
    spec = seen(dy, key.shape[2], window)
    capped = softcap_flops(spec, softcap)
    return _composed(
        matmul=(5 if softcap else 4) * 2 * dy.shape[3] * spec.nelms,
        mul=spec.nelms,
        softmax_grad=_flops("softmax_grad", spec, spec, spec, 3),
        dropout=0 if seed_tensor is None else _flops("dropout", spec, spec, seed_tensor, p),
        tanh=2 * capped,
    )
