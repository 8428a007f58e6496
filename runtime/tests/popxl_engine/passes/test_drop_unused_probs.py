"""Attention without probabilities: its result in the same bits, and only where nobody reads what is
not there.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import popxl
import pytest
import torch
from helpers.attention_gradients import results
from helpers.attention_programs import DATA, MASK, SHAPES, dtypes, hiding, normal, ways
from popxl import Tensor, ops
from popxl_engine.kernels.attention import attention, attention_no_probs


@ways
@dtypes
@pytest.mark.parametrize("p, seeds", [(0.0, 0), (0.2, 2)])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[3]])
def test_the_result_alone_has_the_same_bits(
    shape: tuple[int, ...],
    p: float,
    seeds: int,
    dtype: torch.dtype,
    way: str,
    by: Any,
) -> None:
    by(way)
    batch, heads, queries, keys, width = shape
    seeds = math.gcd(seeds, batch)
    query, key, value = (
        normal(dtype, batch, heads, n, width, seed=i, is_nested=True)
        for i, n in enumerate((queries, keys, keys))
    )
    seed = torch.arange(5, 5 + 2 * seeds).to(torch.uint32).reshape(seeds, 2) if seeds else None
    mask = hiding(queries, keys, keys, dtype)
    mask[queries // 2] = -math.inf
    operands = (query, key.transpose(2, 3), value, mask, 0.2, seed, p)
    found = attention_no_probs(*operands)
    torch.testing.assert_close(found, attention(*operands)[-1], rtol=0, atol=0, equal_nan=True)


TWISTS = [
    "",
    "probs are copied",
    "probs are given",
    "probs are read",
    "probs are written",
    "probs are stored",
]


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("twist", TWISTS)
def test_probabilities_are_left_out_where_nobody_reads_them(twist: str, p: float) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        probs = ops.softmax(
            q @ k.transpose((0, 1, 3, 2)) * 0.25 + popxl.constant(MASK[:4, :4]), axis=-1
        )
        y = (ops.dropout(probs, popxl.constant([3, 4], popxl.uint32), p) if p else probs) @ v
        if twist == "probs are read":
            return [y, ops.sum(probs)]
        if twist == "probs are written":
            return [y, ops.add_(probs, probs)]
        return [y, probs]

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        operands = [popxl.variable(DATA[n], popxl.float32, name=n) for n in "qkv"]
        y, other = ops.call(ir.create_graph(attend, *operands), *operands)
        if twist == "probs are copied":
            ops.call(ir.create_graph(lambda t: t, other), other)
        if twist == "probs are stored":
            place = popxl.variable(np.zeros(other.shape, np.float32), name="place")
            ops.var_updates.copy_var_update_(place, other)
            other = place
        return [y] if twist in ("", "probs are copied") else [y, other]

    expected, _ = results(build, interpret=True)
    found, counts = results(build)
    is_unread = twist in ("", "probs are copied")
    assert counts == {"fused_attention_no_probs" if is_unread else "fused_attention": 1}
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_read", [False, True])
def test_a_loop_gives_probabilities_where_somebody_reads_them(is_read: bool) -> None:
    def body(before: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        probs = ops.softmax(
            q @ k.transpose((0, 1, 3, 2)) * 0.25 + popxl.constant(MASK[:4, :4]), axis=-1
        )
        y = probs @ v
        return [probs if is_read else before, y]

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        q, k, v = (popxl.variable(DATA[n], popxl.float32, name=n) for n in "qkv")
        first = popxl.variable(np.ones((2, 6, 4, 4), np.float32), name="first")
        return ops.repeat(ir.create_graph(body, first, q, k, v), 2, first, q, k, v)

    expected, _ = results(build, interpret=True)
    found, counts = results(build)
    assert counts == {"fused_attention" if is_read else "fused_attention_no_probs": 1}
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_the_rule_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose((0, 1, 3, 2)) * 0.25 + popxl.constant(MASK[:4, :4])
        return ops.softmax(scores, axis=-1) @ v

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        return [attend(*(popxl.variable(DATA[n], popxl.float32, name=n) for n in "qkv"))]

    alone, counts = results(build)
    assert counts == {"fused_attention_no_probs": 1}
    monkeypatch.setenv("POPXL_PASSES", "-drop_unused_probs")
    kept, counts = results(build)
    assert counts == {"fused_attention": 1} and np.array_equal(alone[0], kept[0])
