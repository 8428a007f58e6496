"""Attention in one step: the textbook's numbers by autograd in float64, and the interpreter's in
whole programs.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import popxl
import popxl_addons as addons
import pytest
import torch
from helpers.attention_programs import (
    COMPILED,
    DATA,
    MASK,
    SHAPES,
    dtypes,
    error,
    hiding,
    normal,
    textbook,
    ways,
)
from helpers.engine_runs import engine_of
from helpers.fused_programs import observe as results_of
from helpers.quick import cases
from popxl import Tensor, ops
from popxl.ops.normalisation import softmax_grad
from popxl_engine.kernels.attention import attention, attention_grad
from popxl_engine.kernels.registry import KERNELS


def run(
    tensors: Sequence[torch.Tensor], mask: torch.Tensor, scale: float, seed: Any, p: float
) -> list[torch.Tensor]:
    query, key, value, dy = tensors
    probs, *dropped, y = attention(query, key.transpose(2, 3), value, mask, scale, seed, p)
    factors = (dropped or [probs])[0]
    key_t, value_t = query.transpose(2, 3), value.transpose(2, 3)
    d_query, d_key_t, d_value = attention_grad(
        dy, key_t, key, value_t, probs, factors, scale, seed, p
    )
    return [probs, y, d_query, d_key_t.transpose(2, 3), d_value]


@pytest.mark.quick_every(7)
@ways
@dtypes
@pytest.mark.parametrize(
    "p, seeds", [(0.0, 0), pytest.param(0.2, 1, marks=pytest.mark.slow), (0.2, 2)]
)
@pytest.mark.parametrize("is_nested", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("shape", cases(SHAPES, lambda shape: shape != SHAPES[0]))
def test_results_and_gradients_are_the_textbooks(
    shape: tuple[int, ...],
    is_nested: bool,
    p: float,
    seeds: int,
    dtype: torch.dtype,
    way: str,
    by: Any,
) -> None:
    by(way)
    batch, heads, queries, keys, width = shape
    seeds = math.gcd(seeds, batch)
    tensors = [
        normal(dtype, batch, heads, n, width, seed=i, is_nested=is_nested)
        for i, n in enumerate((queries, keys, keys, queries))
    ]
    seed = torch.arange(5, 5 + 2 * seeds).to(torch.uint32).reshape(seeds, 2) if seeds else None
    kept = None
    if seed is not None:
        kept = KERNELS["dropout"](
            torch.ones(batch, heads, queries, keys, dtype=torch.float64), seed, p
        )
    for band in (keys, 3):
        mask, scale = hiding(queries, keys, band, dtype), 1 / math.sqrt(width)
        found, expected = run(tensors, mask, scale, seed, p), textbook(tensors, mask, scale, kept)
        assert torch.equal(found[0] == 0, expected[0].to(dtype) == 0)
        for name, one, other in zip(("probs", "y", "query", "key", "value"), found, expected):
            if other.any():
                assert error(one, other) < (1e-6 if dtype is torch.float32 else 0.012), name


@pytest.mark.parametrize("way", COMPILED)
@dtypes
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_bits_do_not_depend_on_threads_and_heads_nor_on_other_parts_of_the_batch(
    p: float, dtype: torch.dtype, way: str, by: Any
) -> None:
    by(way)
    before = torch.get_num_threads()
    tensors = [normal(dtype, 4, 3, 96, 32, seed=i, is_nested=True) for i in range(4)]
    seeds = torch.arange(8).to(torch.uint32).reshape(4, 2) if p else None
    mask = hiding(96, 96, 96, dtype)
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run(tensors, mask, 0.2, seeds, p))
    finally:
        torch.set_num_threads(before)
    part = run([t[1:2] for t in tensors], mask, 0.2, None if seeds is None else seeds[1], p)
    for first, second, third, alone in zip(*results, part):
        assert (
            torch.equal(first, second)
            and torch.equal(first, third)
            and torch.equal(first[1:2], alone)
        )


@ways
@dtypes
def test_a_query_that_sees_no_key_gives_no_numbers(dtype: torch.dtype, way: str, by: Any) -> None:
    by(way)
    tensors = [normal(dtype, 1, 1, 4, 8, seed=i) for i in range(4)]
    mask = hiding(4, 4, 4, dtype)
    mask[2] = -math.inf
    probs, y, *_ = run(tensors, mask, 0.3, None, 0.0)
    assert probs[0, 0, 2].isnan().all() and y[0, 0, 2].isnan().all()
    assert not y[0, 0, [0, 1, 3]].isnan().any()


@ways
@dtypes
@pytest.mark.parametrize("rows", [slice(0, 32), slice(32, 40), slice(0, 40)])
def test_many_queries_that_see_no_key_give_no_numbers(
    rows: slice, dtype: torch.dtype, way: str, by: Any
) -> None:
    by(way)
    tensors = [normal(dtype, 1, 2, 40, 8, seed=i) for i in range(4)]
    mask = hiding(40, 40, 40, dtype)
    mask[rows] = -math.inf
    probs, y, *_ = run(tensors, mask, 0.3, None, 0.0)
    for found in (probs, y):
        assert torch.equal(found.isnan().all(-1), found.isnan().any(-1))
        assert torch.equal(found[0, 0].isnan().all(-1), torch.isinf(mask).all(-1))


@ways
@dtypes
def test_numbers_in_a_mask_count_wherever_they_are(dtype: torch.dtype, way: str, by: Any) -> None:
    by(way)
    tensors = [normal(dtype, 1, 2, 70, 16, seed=i) for i in range(4)]
    for place in ((0, 0), (31, 31), (32, 63), (69, 64), (69, 69)):
        mask = hiding(70, 70, 70, dtype)
        mask[place] = 2.0
        expected = textbook(tensors, mask, 0.3, None)
        for one, other in zip(run(tensors, mask, 0.3, None, 0.0), expected):
            assert error(one, other) < (1e-6 if dtype is torch.float32 else 0.012)


@ways
@dtypes
def test_later_queries_may_see_fewer_keys(dtype: torch.dtype, way: str, by: Any) -> None:
    by(way)
    tensors = [normal(dtype, 2, 1, 100, 16, seed=i) for i in range(4)]
    mask = hiding(100, 100, 100, dtype).flip(0).contiguous()
    for one, other in zip(run(tensors, mask, 0.3, None, 0.0), textbook(tensors, mask, 0.3, None)):
        assert error(one, other) < (1e-6 if dtype is torch.float32 else 0.012)


# Programs


def attend(q: Tensor, k: Tensor, v: Tensor, seed: Tensor, p: float, twist: str) -> Tensor:
    query, key, value = (t.transpose((0, 2, 1, 3)) for t in (q, k, v))
    scores = query @ key.transpose((0, 1, 3, 2)) * 0.25 + popxl.constant(MASK, q.dtype)
    if twist == "scores are seen":
        popxl.graph_output(scores)
    probs = ops.softmax(scores, axis=-1)
    if p:
        probs = ops.dropout(probs, seed, p)
    if twist == "probs are changed":
        probs = ops.add_(probs, probs)
    if twist == "probs are seen before":
        popxl.graph_output(probs * 2.0)
    return (probs @ value).transpose((0, 2, 1, 3)).reshape(q.shape)


def observe(
    dtype: popxl.dtype, p: float, twist: str, recomputing: bool, interpret: bool = False
) -> tuple[Any, dict[str, int]]:
    """(result and gradients, how often each fused kernel of attention stands in the program)."""
    ir = popxl.Ir()
    with ir.main_graph:
        q, k, v, d = (popxl.variable(a, dtype, name=n) for n, a in DATA.items())
        seed = popxl.constant(np.array([3, 4], np.uint32), popxl.uint32)
        graph = ir.create_empty_graph("attend")
        with graph:
            inputs = [popxl.graph_input(t.shape, t.dtype) for t in (q, k, v, seed)]
            y = attend(*inputs, p, twist)
            popxl.graph_output(y)
        if twist == "probs are changed":  # there is no gradient of that
            results = list(ops.call(graph, q, k, v, seed))
        else:
            named = addons.GraphWithNamedArgs(graph)
            grad = addons.autodiff(named, grads_provided=[y], grads_required=graph.inputs[:3])
            if recomputing:
                grad = addons.recompute_graph(grad)
            call = ops.call_with_info(graph, q, k, v, seed)
            gradients = ops.call(grad.graph, d, inputs_dict=grad.grad_graph_info.inputs_dict(call))
            results = [call.graph_to_parent(y), *gradients]
        streams = [popxl.d2h_stream(t.shape, t.dtype) for t in results]
        for stream, t in zip(streams, results):
            ops.host_store(stream, t)
    engine = engine_of(ir, interpret)
    outputs = {s: np.zeros((1, 1, *s.shape), s.dtype.as_numpy()) for s in streams}
    engine.run({}, outputs)
    counts = {}
    if engine.program is not None:
        names = re.findall(r"k_fused_(attention\w*?)_\d+\w*\(", engine.program.source.text())
        counts = {name: names.count(name) for name in names}
    return list(outputs.values()), counts


@ways
@pytest.mark.parametrize("recomputing", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize(
    "dtype",
    cases(
        [popxl.float32, popxl.bfloat16],
        lambda dtype: dtype is popxl.float32,
        ["float32", "bfloat16"],
    ),
)
def test_programs_are_fused_and_give_the_interpreters_numbers(
    dtype: popxl.dtype, p: float, recomputing: bool, way: str, by: Any
) -> None:
    by(way)
    expected, _ = observe(dtype, p, "", recomputing, interpret=True)
    found, counts = observe(dtype, p, "", recomputing)
    assert counts == {"attention_no_probs" if recomputing else "attention": 1, "attention_grad": 1}
    for one, other in zip(found, expected):
        np.testing.assert_allclose(
            one,
            other,
            **({"rtol": 1e-5, "atol": 1e-6} if dtype is popxl.float32 else {"atol": 0.03}),
        )


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("twist", ["scores are seen", "probs are changed", "probs are seen before"])
def test_what_others_see_or_change_is_not_fused(twist: str, p: float) -> None:
    expected, _ = observe(popxl.float32, p, twist, False, interpret=True)
    found, counts = observe(popxl.float32, p, twist, False)
    assert "attention" not in counts
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_masked", [False, True])
def test_what_is_multiplied_with_dy_may_be_anything(is_masked: bool) -> None:
    numbers = [
        np.random.default_rng(i).normal(size=(1, 1, 64, n)).astype(np.float32)
        for i, n in enumerate([8] * 4 + [64])
    ]
    mask = np.zeros((64, 64), np.float32)
    mask[:, 32:] = -np.inf

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        query, key, value, dy, x = (
            popxl.variable(a, popxl.float32, name=f"v{i}") for i, a in enumerate(numbers)
        )
        given = popxl.variable(np.exp(mask), popxl.float32, name="given")
        hiding = (
            popxl.constant(mask) if is_masked else popxl.variable(mask, popxl.float32, name="mask")
        )
        probs = ops.softmax(query @ key.transpose((0, 1, 3, 2)) * 0.3 + hiding, axis=-1)
        if not is_masked:
            probs = probs * given
        y = probs @ value
        d = softmax_grad(dy @ value.transpose((0, 1, 3, 2)), probs, -1) * 0.3
        turned = (query.transpose((0, 1, 3, 2)), x.transpose((0, 1, 3, 2)))
        return [y, d @ key, turned[0] @ d, turned[1] @ dy]

    expected, _ = results_of(build, True)
    found, _ = results_of(build, False)
    for name, (value, _) in expected.items():
        np.testing.assert_allclose(found[name][0], value, rtol=1e-4, atol=1e-4)


def test_attentions_that_are_added_have_each_a_gradient_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POPXL_VERIFY", "1")
    swapped, (query, dy, *keys) = (
        (0, 1, 3, 2),
        (normal(torch.float32, 2, 2, 6, 8, seed=i).numpy() for i in range(6)),
    )

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        q, d_y = popxl.variable(query, name="query"), popxl.variable(dy, name="dy")
        results: list[Tensor] = []
        for n in (0, 2):
            key, value = (popxl.variable(a, name=f"v{n}") for a in keys[n : n + 2])
            scores = q @ key.transpose(swapped) * 0.3 + popxl.constant(np.zeros((6, 6), np.float32))
            probs = ops.softmax(scores, axis=-1)
            d, d_value = d_y @ value.transpose(swapped), probs.transpose(swapped) @ d_y
            d = softmax_grad(d, probs, -1) * 0.3
            results += [probs @ value, d @ key, q.transpose(swapped) @ d, d_value]
        return results

    expected, _ = results_of(build, True)
    found, engine = results_of(build, False)
    for name, (value, _) in expected.items():
        np.testing.assert_allclose(found[name][0], value, rtol=1e-5, atol=1e-6)
    assert len(re.findall(r"k_fused_attention_grad_\d+\w*\(", engine.program.source.text())) == 2


def test_the_pass_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPXL_PASSES", "-fuse_attention")
    assert observe(popxl.float32, 0.0, "", False)[1] == {}
