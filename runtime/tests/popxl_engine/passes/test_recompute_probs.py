"""Gradients of attention that make probabilities again: the same bits, only where nobody else reads
them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import popxl
import popxl_addons as addons
import pytest
import torch
from helpers.attention_by_hand import attended, twisted
from helpers.attention_gradients import results
from helpers.attention_programs import (
    COMPILED,
    DATA,
    MASK,
    SHAPES,
    dtypes,
    hiding,
    normal,
    textbook,
    ways,
)
from popxl import Tensor, ops
from popxl_engine.kernels.attention import attention_grad
from popxl_engine.native import library as native
from popxl_engine.planner.live_bytes import LiveBytes


def both(
    shape: tuple[int, ...], mask: torch.Tensor, dtype: torch.dtype, p: float
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Gradients from probabilities that are made again, and from those of the forward pass."""
    operands, probs, seed = attended(shape, mask, dtype, p)
    kept = attention_grad(*operands, *probs, 0.2, seed, p, mask)
    return attention_grad(*operands, None, None, 0.2, seed, p, mask), kept


def check_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], way: str) -> None:
    for one, other in zip(found, expected):
        if way == "parts":
            tolerance = 0.02 if one.dtype is torch.bfloat16 else 1e-5
            torch.testing.assert_close(one, other, rtol=tolerance, atol=1e-3, equal_nan=True)
        else:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.quick_every(11)
@ways
@dtypes
@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("band", [None, 3])
def test_gradients_have_the_same_bits(
    shape: tuple[int, ...], band: int | None, p: float, dtype: torch.dtype, way: str, by: Any
) -> None:
    by(way)
    *_, queries, keys, _ = shape
    found, expected = both(shape, hiding(queries, keys, band or keys, dtype), dtype, p)
    assert keys < 32 or all(t.abs().sum() > 0 for t in expected)
    check_same(found, expected, way)


@ways
@dtypes
def test_gradients_are_the_textbooks(dtype: torch.dtype, way: str, by: Any) -> None:
    by(way)
    tensors = [normal(dtype, 2, 2, 70, 16, seed=i) for i in range(4)]
    query, key, value, dy = tensors
    mask = hiding(70, 70, 70, dtype)
    d_query, d_key_t, d_value = attention_grad(
        dy, query.transpose(2, 3), key, value.transpose(2, 3), None, None, 0.3, None, 0.0, mask
    )
    *_, expected_query, expected_key, expected_value = textbook(tensors, mask, 0.3, None)
    pairs = (
        (d_query, expected_query),
        (d_key_t.transpose(2, 3), expected_key),
        (d_value, expected_value),
    )
    for found, expected in pairs:
        assert (found.double() - expected).norm() < (
            1e-6 if dtype is torch.float32 else 0.012
        ) * expected.norm()


@pytest.mark.quick_every(5)
@ways
@dtypes
@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize(
    "hidden", [[3], range(32, 64), range(96)], ids=["a query", "32 queries", "all"]
)
def test_queries_without_keys_give_no_numbers(
    hidden: Sequence[int], p: float, dtype: torch.dtype, way: str, by: Any
) -> None:
    by(way)
    mask = hiding(96, 96, 96, dtype)
    mask[list(hidden)] = -math.inf
    found, expected = both((1, 1, 96, 96, 8), mask, dtype, p)
    assert all(t.isnan().any() for t in expected)
    check_same(found, expected, way)


@ways
@dtypes
def test_later_queries_may_see_fewer_keys(dtype: torch.dtype, way: str, by: Any) -> None:
    by(way)
    check_same(
        *both((2, 1, 100, 100, 16), hiding(100, 100, 100, dtype).flip(0).contiguous(), dtype, 0.2),
        way,
    )


@pytest.mark.parametrize("way", COMPILED)
@dtypes
def test_bits_do_not_depend_on_threads(dtype: torch.dtype, way: str, by: Any, threads: Any) -> None:
    by(way)
    found = []
    for count in (1, 2, 3):
        threads(count)
        found.append(both((4, 3, 96, 96, 32), hiding(96, 96, 96, dtype), dtype, 0.1)[0])
    for one, two, three in zip(*found):
        assert torch.equal(one, two) and torch.equal(one, three)


@pytest.mark.skipif(
    native.library() is None, reason="no C++ compiler: nothing is beside the operands"
)
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_a_dry_run_counts_what_each_thread_takes_beside_operands_and_results(
    p: float, threads: Any
) -> None:
    threads(2)
    sequence, width = 320, 16
    with torch.device("meta"), LiveBytes() as live:
        query, key, value, dy = (torch.empty(1, 2, sequence, width) for _ in range(4))
        mask, seed = (
            torch.empty(sequence, sequence),
            torch.empty(2, dtype=torch.uint32) if p else None,
        )
        before = live.begin()
        attention_grad(
            dy, query.transpose(2, 3), key, value.transpose(2, 3), None, None, 0.3, seed, p, mask
        )
        needed = live.highest - before
    scratch, results = (
        2 * (2 * sequence + 32 * bool(p)) * sequence * 4,
        3 * 2 * sequence * width * 4,
    )
    assert scratch + results <= needed < scratch + results + 1024


# Programs

REMADE = {"fused_attention_no_probs": 1, "fused_attention_grad": 1}
KEPT = {"fused_attention": 1, "fused_attention_grad": 1}


def recomputing(p: float, is_projected: bool = False) -> Callable[[popxl.Ir], Sequence[Tensor]]:
    """Attention and its gradient, which computes its forward pass again; projected: and needs the
    result of that.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, seed: Tensor, w: Tensor) -> Tensor:
        probs = ops.softmax(
            q @ k.transpose((0, 1, 3, 2)) * 0.25 + popxl.constant(MASK[:4, :4]), axis=-1
        )
        y = (ops.dropout(probs, seed, p) if p else probs) @ v
        return y @ w if is_projected else y

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        q, k, v, dy = (popxl.variable(DATA[n], popxl.float32, name=n) for n in "qkvd")
        seed, w = (
            popxl.constant([3, 4], popxl.uint32),
            popxl.variable(np.eye(8, dtype=np.float32), name="w"),
        )
        graph = ir.create_graph(attend, q, k, v, seed, w)
        inputs = graph.inputs[:3] + (graph.inputs[4:] if is_projected else ())
        grad = addons.recompute_graph(
            addons.autodiff(addons.GraphWithNamedArgs(graph), grads_required=inputs)
        )
        call = ops.call_with_info(graph, q, k, v, seed, w)
        return [
            call.outputs[0],
            *ops.call(grad.graph, dy, inputs_dict=grad.grad_graph_info.inputs_dict(call)),
        ]

    return build


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_gradient_that_computes_attention_again_keeps_no_probabilities(
    p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = results(recomputing(p), interpret=True)
    found, counts = results(recomputing(p))
    assert counts == REMADE
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    monkeypatch.setenv("POPXL_PASSES", "-recompute_probs")
    kept, counts = results(recomputing(p))
    assert counts == {**KEPT, "fused_attention_no_probs": 1}
    assert all(np.array_equal(*pair) for pair in zip(found, kept))


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_probabilities_are_kept_where_the_result_is_needed_again(p: float) -> None:
    expected, _ = results(recomputing(p, is_projected=True), interpret=True)
    found, counts = results(recomputing(p, is_projected=True))
    assert counts == {**KEPT, "fused_attention_no_probs": 1}
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


TWISTS = [
    "",
    "result is read",
    "probs are read",
    "mask is changed",
    "seed is changed",
    "query is changed",
    "a part of the query is changed",
    "another seed",
    "another p",
    "another scale",
    "another key",
    "probs as factors",
    "other probs",
]


@pytest.mark.parametrize("twist", TWISTS)
def test_only_where_all_is_the_attentions_and_nobody_else_reads_it(twist: str) -> None:
    build = twisted(twist, is_read=twist == "result is read")
    expected, _ = results(build, interpret=True)
    found, counts = results(build)
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert (counts == {"fused_attention_grad": 1}) == (twist == "")
