"""Gradients of queries, keys and values side by side: the numbers of three, and only where nobody
else sees them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import popxl
import pytest
import torch
from helpers.attention_gradients import B, D, H, N, program, results, with_gradients
from helpers.attention_programs import dtypes, hiding, normal, ways
from popxl import Tensor, ops
from popxl_engine.kernels.attention import attention_grad, attention_grad_packed


@ways
@dtypes
@pytest.mark.parametrize("are_given", [True, False])
def test_rows_are_the_three_gradients_side_by_side(
    are_given: bool, dtype: torch.dtype, way: str, by: Any
) -> None:
    by(way)
    dy, query, key, value = (normal(dtype, B, H, N, D, seed=i, is_nested=True) for i in range(4))
    probs = (
        torch.softmax(normal(torch.float32, B, H, N, N, seed=5), -1).to(dtype)
        if are_given
        else None
    )
    mask = None if are_given else hiding(N, N, N, dtype)
    operands = (
        dy,
        query.transpose(2, 3),
        key,
        value.transpose(2, 3),
        probs,
        probs,
        0.25,
        None,
        0.0,
        mask,
    )
    d_query, d_key_t, d_value = attention_grad(*operands)
    parts = (d_query, d_key_t.transpose(2, 3), d_value)
    side_by_side = torch.cat([t.transpose(1, 2).reshape(B * N, H * D) for t in parts], 1)
    assert torch.equal(attention_grad_packed(*operands), side_by_side)


JOINED = {"fused_attention": 1, "fused_attention_grad_packed": 1}
APART = {"fused_attention": 1, "fused_attention_grad": 1, "concat": 1}


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [popxl.float32, popxl.bfloat16], ids=lambda d: d.name)
def test_programs_join_them_and_give_the_interpreters_numbers(dtype: popxl.dtype, p: float) -> None:
    expected, _ = results(program(dtype, p, ""), interpret=True)
    found, counts = results(program(dtype, p, ""))
    assert counts == JOINED
    for one, other in zip(found, expected):
        np.testing.assert_allclose(
            one,
            other,
            **({"rtol": 1e-5, "atol": 1e-5} if dtype is popxl.float32 else {"atol": 0.03}),
        )


@pytest.mark.parametrize(
    "twist, counts",
    [
        ("other sequences", JOINED),
        ("another order", APART),
        ("one is used twice", APART),
        ("queries of keys", APART),
        ("heads apart", APART),
        ("keys are shared", {**APART, "concat": 3}),
    ],
)
def test_only_rows_in_order_are_joined(twist: str, counts: dict[str, int]) -> None:
    build = program(popxl.float32, 0.0, twist)
    expected, _ = results(build, interpret=True)
    found, kernels = results(build)
    assert kernels == counts
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [D, 6])
def test_heads_of_values_may_have_a_width_of_their_own(width: int) -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        heads = [
            popxl.variable(
                np.random.default_rng(i).standard_normal((B, N, H, n)).astype(np.float32),
                name=f"v{i}",
            )
            for i, n in enumerate([D, D, width])
        ]
        graph = ir.create_empty_graph("attend")
        with graph:
            inputs = [popxl.graph_input(t.shape, t.dtype) for t in heads]
            query, key, value = (t.transpose((0, 2, 1, 3)) for t in inputs)
            probs = ops.softmax(
                query @ key.transpose((0, 1, 3, 2)) * 0.25 + popxl.constant(np.zeros((N, N))), -1
            )
            popxl.graph_output((probs @ value).transpose((0, 2, 1, 3)))
        y, *gradients = with_gradients(graph, heads, inputs, heads[2])
        rows = [t.reshape((B * N, H, t.shape[3])) for t in gradients]
        return [y, ops.concat(rows, axis=1 if width == D else 2)]

    expected, _ = results(build, interpret=True)
    found, counts = results(build)
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert ("fused_attention_grad" in counts) == (
        width == D
    ) and "fused_attention_grad_packed" not in counts


def test_the_rule_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    build = program(popxl.float32, 0.0, "")
    joined, _ = results(build)
    monkeypatch.setenv("POPXL_PASSES", "-pack_qkv_grads")
    apart, counts = results(build)
    assert counts == APART and all(np.array_equal(*pair) for pair in zip(joined, apart))
