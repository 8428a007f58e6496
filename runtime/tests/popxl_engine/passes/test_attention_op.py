"""`popxl.extensions.attention`: the kernels and the bits of its composition, masks as constants and
as inputs, gradients, and what is left out where nobody needs it.
"""

import math
from typing import Any

import numpy as np
import popxl
import popxl_addons as addons
import pytest
import torch
from helpers.attention_gradients import with_gradients
from helpers.attention_programs import DATA, MASK
from helpers.fused_programs import both_types, fused_steps, observe
from hypothesis import given, settings
from hypothesis import strategies as st
from popxl import Tensor, ops
from popxl.extensions import attention

HEADS = {n: np.ascontiguousarray(a.swapaxes(1, 2)) for n, a in DATA.items()}
SCALE = 1 / math.sqrt(8)
KINDS = ("constant", "input")
PADDING = np.where(np.arange(6) < [[[[4]]], [[[6]]]], 0.0, -1e4).astype(np.float32)


def composed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, seed: Any, p: float) -> Tensor:
    probs = ops.softmax(q @ k.transpose((0, 1, 3, 2)) * SCALE + mask, axis=-1)
    return (ops.dropout(probs, seed, p) if p else probs) @ v


def declared(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, seed: Any, p: float) -> Tensor:
    return attention(q, k, v, mask, seed_tensor=seed if p else None, p=p)


def run(
    attend: Any,
    dtype: popxl.dtype = popxl.float32,
    p: float = 0.0,
    kind: str = "constant",
    mask: np.ndarray = MASK,
    required: int = 3,
    interpret: bool = False,
) -> tuple[list[np.ndarray], Any]:
    """(result and gradients of the first inputs, the engine)."""

    def build(ir: popxl.Ir) -> list[Tensor]:
        q, k, v, d, added = (
            popxl.variable(a, dtype, name=n) for n, a in {**HEADS, "mask": mask}.items()
        )
        seed = popxl.constant(np.array([3, 4], np.uint32))
        graph = ir.create_empty_graph("attend")
        with graph:
            inner = [popxl.graph_input(t.shape, t.dtype) for t in (q, k, v, seed, added)]
            fixed = popxl.constant(mask, dtype) if kind == "constant" else inner[4]
            popxl.graph_output(attend(*inner[:3], fixed, inner[3], p))
        wanted = [*graph.inputs[:3], graph.inputs[4]][:required]
        return with_gradients(graph, [q, k, v, seed, added], wanted, d)

    values, engine = observe(build, interpret)
    return [value for name, (value, _) in values.items() if name.startswith("output")], engine


@both_types
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_the_op_is_its_composition_in_the_same_kernels_and_bits(
    dtype: popxl.dtype, p: float, kind: str
) -> None:
    (found, engine), (expected, other) = (run(f, dtype, p, kind) for f in (declared, composed))
    assert fused_steps(engine) == fused_steps(other) == {"attention", "attention_grad"}
    assert all(map(np.array_equal, found, expected))


@both_types
@pytest.mark.parametrize("mask", [MASK, PADDING], ids=["causal", "padding"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_the_interpreter_defines_the_op_as_its_composition(
    dtype: popxl.dtype, p: float, mask: np.ndarray
) -> None:
    found, expected = (
        run(f, dtype, p, "input", mask, required=4, interpret=True)[0] for f in (declared, composed)
    )
    assert all(map(np.array_equal, found, expected))


def test_a_mask_for_each_sequence_is_computed_without_the_kernels() -> None:
    found, engine = run(declared, p=0.3, mask=PADDING)
    assert fused_steps(engine) == {"attention_grad"}
    for one, other in zip(found, run(declared, p=0.3, mask=PADDING, interpret=True)[0]):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_gradient_of_the_mask_costs_nothing_where_nobody_needs_it() -> None:
    sources = {n: run(declared, kind="input", required=n)[1].program.source.text() for n in (3, 4)}
    assert "softmax_grad" not in sources[3] and "softmax_grad" in sources[4]


def test_a_gradient_that_recomputes_keeps_no_probabilities() -> None:
    def build(ir: popxl.Ir) -> list[Tensor]:
        q, k, v, d = (popxl.variable(a, name=n) for n, a in HEADS.items())
        graph = ir.create_graph(lambda q, k, v: attention(q, k, v, causal=True), q, k, v)
        grad = addons.autodiff(
            addons.GraphWithNamedArgs(graph),
            grads_provided=graph.outputs[:1],
            grads_required=graph.inputs,
        )
        again = addons.recompute_graph(grad)
        call = ops.call_with_info(graph, q, k, v)
        inputs = again.grad_graph_info.inputs_dict(call)
        return [call.outputs[0], *ops.call(again.graph, d, inputs_dict=inputs)]

    values, engine = observe(build, False)
    assert fused_steps(engine) == {"attention_no_probs", "attention_grad"}
    expected, _ = run(composed)
    outputs = [value for name, (value, _) in values.items() if name.startswith("output")]
    for one, other in zip(outputs, expected):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


sizes = st.integers(1, 9)


@settings(max_examples=25, deadline=None)
@given(sizes, sizes, sizes, sizes, sizes, st.sampled_from(["", "causal", "rows", "padding"]))
def test_random_attention_is_torchs(
    b: int, h: int, q: int, extra: int, d: int, masking: str
) -> None:
    keys, rng = q + extra, np.random.default_rng(b + h + q + d)
    shapes = ((b, h, q, d), (b, h, keys, d), (b, h, keys, d), (b, h, q, d))
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    of_mask = {"rows": (q, keys), "padding": (b, 1, 1, keys)}.get(masking)
    mask = None if of_mask is None else rng.normal(size=of_mask).astype(np.float32)

    def build(ir: popxl.Ir) -> list[Tensor]:
        given = [popxl.variable(a, name=f"v{i}") for i, a in enumerate(arrays[:3])]
        dy, graph = popxl.variable(arrays[3], name="dy"), ir.create_empty_graph("attend")
        with graph:
            inner = [popxl.graph_input(t.shape, t.dtype) for t in given]
            added = None if mask is None else popxl.constant(mask)
            popxl.graph_output(attention(*inner, added, causal=masking == "causal"))
        return with_gradients(graph, given, graph.inputs, dy)

    values, _ = observe(build, False)
    found = [value for name, (value, _) in values.items() if name.startswith("output")]
    for one, other in zip(found, torchs(arrays, mask, masking == "causal")):
        np.testing.assert_allclose(one[0, 0], other, rtol=1e-4, atol=1e-5)


def torchs(arrays: list[np.ndarray], mask: np.ndarray | None, causal: bool) -> list[np.ndarray]:
    """Result and gradients by torch, in float64."""
    q, k, v, dy = (torch.from_numpy(a).double().requires_grad_() for a in arrays)
    added = torch.zeros(q.shape[2], k.shape[2]) if mask is None else torch.from_numpy(mask)
    if causal:
        hidden = torch.ones_like(added).tril(added.shape[1] - added.shape[0]) == 0
        added = added.masked_fill(hidden, -math.inf)
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, added.double())
    return [t.detach().numpy() for t in (y, *torch.autograd.grad(y, (q, k, v), dy.detach()))]
