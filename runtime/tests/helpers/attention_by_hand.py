"""Attention and its gradient op by op, with a twist that passes must see."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import popxl
import torch
from helpers.attention_programs import DATA, MASK, normal
from popxl import Tensor, ops
from popxl.ops.normalisation import softmax_grad
from popxl_engine.kernels.attention import attention


def attended(
    shape: tuple[int, ...], mask: torch.Tensor, dtype: torch.dtype, p: float
) -> tuple[Any, Any, Any]:
    """The values of an attention: its gradient's operands, its probabilities with what is left of
    them, and its seeds.
    """
    batch, heads, queries, keys, width = shape
    query, key, value, dy = (
        normal(dtype, batch, heads, n, width, seed=i, is_nested=True)
        for i, n in enumerate((queries, keys, keys, queries))
    )
    seed = torch.arange(5, 5 + 2 * batch).to(torch.uint32).reshape(batch, 2) if p else None
    probs, *dropped, _ = attention(query, key.transpose(2, 3), value, mask, 0.2, seed, p)
    operands = (dy, query.transpose(2, 3), key, value.transpose(2, 3))
    return operands, (probs, (dropped or [probs])[0]), seed


def twisted(twist: str, is_read: bool = True) -> Callable[[popxl.Ir], Sequence[Tensor]]:
    """Attention and its gradient by hand, with a twist that rules must see. Whether anything reads
    the result.
    """

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        query, key, value, dy = (popxl.variable(DATA[n], name=n) for n in "qkvd")
        mask, other = (
            popxl.variable(MASK[:4, :4], name="mask"),
            popxl.variable(np.ones((2, 6, 4, 4), np.float32) / 4),
        )
        seed, other_seed = (
            popxl.variable(np.array([3, n], np.uint32), name=f"seed{n}") for n in (4, 5)
        )
        asking = asked = query
        if twist == "a part of the query is changed":
            parts = [query[:, :, :1], query[:, :, 1:] + 1.0]
            asking = ops.concat(parts, axis=2)
        probs = ops.softmax(asking @ key.transpose((0, 1, 3, 2)) * 0.3 + mask, axis=-1)
        dropped = ops.dropout(probs, seed, 0.25)
        y = dropped @ value
        changed = {"mask is changed": mask, "seed is changed": seed, "query is changed": query}.get(
            twist
        )
        if changed is not None:
            ops.add_(changed, changed)
        if twist == "a part of the query is changed":
            ops.add_(parts[1], parts[1])
            asked = ops.concat(parts, axis=2)
        drawn_from = other_seed if twist == "another seed" else seed
        if twist == "seed is copied":
            (drawn_from,) = ops.call(ir.create_graph(lambda t: t, seed), seed)
        given = {"other probs": other, "probs come dropped": dropped}.get(twist, probs)
        factors = {"other factors": other, "probs as factors": probs}.get(twist, dropped)
        d = ops.dropout(
            dy @ value.transpose((0, 1, 3, 2)), drawn_from, 0.5 if twist == "another p" else 0.25
        )
        d = softmax_grad(d, given, -1) * (0.4 if twist == "another scale" else 0.3)
        by_key = d @ (value if twist == "another key" else key)
        found: list[Tensor] = [
            by_key,
            asked.transpose((0, 1, 3, 2)) @ d,
            factors.transpose((0, 1, 3, 2)) @ dy,
        ]
        return [
            *([y] if is_read else []),
            *([probs] if twist == "probs are read" else []),
            *found,
        ]

    return build
