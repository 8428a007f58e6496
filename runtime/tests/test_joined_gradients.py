"""Gradients of queries, keys and values side by side: the numbers of three, and only where nobody
else sees them.
"""

import re
from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np
import popxl
import popxl_addons as addons
import pytest
import torch
from popxl import Tensor, ops
from popxl_engine.kernels.attention import attention_grad, attention_grad_packed
from test_fused_attention import dtypes, hiding, normal, ways
from test_rewrites import observe

B, N, H, D = 2, 40, 3, 16


@ways
@dtypes
@pytest.mark.parametrize("are_given", [True, False])
def test_rows_are_the_three_gradients_side_by_side(
    are_given: bool, dtype: torch.dtype, way: str, by: Any
) -> None:
    by(way)
    dy, query, key, value = (normal(dtype, B, H, N, D, seed=i, is_nested=True) for i in range(4))
    shares = (
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
        shares,
        shares,
        0.25,
        None,
        0.0,
        mask,
    )
    d_query, d_key_t, d_value = attention_grad(*operands)
    parts = (d_query, d_key_t.transpose(2, 3), d_value)
    side_by_side = torch.cat([t.transpose(1, 2).reshape(B * N, H * D) for t in parts], 1)
    assert torch.equal(attention_grad_packed(*operands), side_by_side)


def program(dtype: popxl.dtype, p: float, twist: str) -> Callable[[popxl.Ir], Sequence[Tensor]]:
    """Attention whose queries, keys and values lie in one tensor: its result and gradient."""
    sizes = enumerate((3, 1))
    numbers = [
        np.random.default_rng(i).standard_normal((B * N, k * H * D)).astype(np.float32)
        for i, k in sizes
    ]

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        x, d = (popxl.variable(a, dtype, name=f"v{i}") for i, a in enumerate(numbers))
        seed = popxl.constant(np.array([3, 4], np.uint32), popxl.uint32)
        graph = ir.create_empty_graph("attend")
        with graph:
            qkv, of_seed = popxl.graph_input(x.shape, dtype), popxl.graph_input((2,), popxl.uint32)
            popxl.graph_output(attend(qkv, of_seed, p, twist))
        return with_gradients(graph, [x, seed], [qkv], d)

    return build


def with_gradients(
    graph: popxl.Graph, inputs: Sequence[Tensor], required: Sequence[Tensor], dy: Tensor
) -> List[Tensor]:
    """A graph's output, and the gradients of the required ones of its inputs."""
    grad = addons.autodiff(
        addons.GraphWithNamedArgs(graph),
        grads_provided=graph.outputs[:1],
        grads_required=list(required),
    )
    call = ops.call_with_info(graph, *inputs)
    return [
        *call.outputs[:1],
        *ops.call(grad.graph, dy, inputs_dict=grad.grad_graph_info.inputs_dict(call)),
    ]


def results(
    build: Callable[[popxl.Ir], Sequence[Tensor]], interpret: bool = False
) -> Tuple[List[np.ndarray], Dict[str, int]]:
    """(a program's results, how often its kernels of attention and concat stand in it)."""
    values, engine = observe(build, interpret)
    source = "" if engine.program is None else engine.program.source.text()
    names = re.findall(r"k_(fused_attention\w*?|concat)_\d+\w*\(", source)
    found = [value for name, (value, _) in values.items() if name.startswith("output")]
    return found, {name: names.count(name) for name in names}


def attend(qkv: Tensor, seed: Tensor, p: float, twist: str) -> Tensor:
    """[B * N, 3 * H * D] -> [B * N, H * D]."""
    parts = ops.split(qkv.reshape((B * N, 3 * H, D)) if twist == "heads apart" else qkv, 3, axis=1)
    if twist == "another order":
        parts = [parts[1], parts[0], parts[2]]
    if twist == "one is used twice":
        parts = [parts[0], parts[1], parts[0] + parts[2]]
    n = 2 * N if twist == "other sequences" else N
    query, key, value = (t.reshape((-1, n, H, D)).transpose((0, 2, 1, 3)) for t in parts)
    if twist == "queries of keys":
        query, key = key.transpose((0, 1, 3, 2)).reshape(query.shape), key
    mask = popxl.constant(np.triu(np.full((n, n), -np.inf, np.float32), 1), qkv.dtype)
    shares = ops.softmax(query @ key.transpose((0, 1, 3, 2)) * 0.25 + mask, axis=-1)
    if p:
        shares = ops.dropout(shares, seed, p)
    return (shares @ value).transpose((0, 2, 1, 3)).reshape((-1, H * D))


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
    ],
)
def test_only_rows_in_order_are_joined(twist: str, counts: Dict[str, int]) -> None:
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
            shares = ops.softmax(
                query @ key.transpose((0, 1, 3, 2)) * 0.25 + popxl.constant(np.zeros((N, N))), -1
            )
            popxl.graph_output((shares @ value).transpose((0, 2, 1, 3)))
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
