"""Attention whose queries, keys and values lie in one tensor, and its gradient by autodiff."""

import re
from collections.abc import Callable, Sequence

import numpy as np
import popxl
import popxl_addons as addons
from helpers.fused_programs import observe
from popxl import Tensor, ops

B, N, H, D = 2, 40, 3, 16


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
) -> list[Tensor]:
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
) -> tuple[list[np.ndarray], dict[str, int]]:
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
    n, heads = 2 * N if twist == "other sequences" else N, H
    if twist == "keys are shared":
        heads = 3 * H - 2
        query, *others = ops.split(qkv, [heads * D, D, D], axis=1)
        parts = [query, *(ops.concat([t] * heads, axis=1) for t in others)]
    query, key, value = (t.reshape((-1, n, heads, D)).transpose((0, 2, 1, 3)) for t in parts)
    if twist == "queries of keys":
        query, key = key.transpose((0, 1, 3, 2)).reshape(query.shape), key
    mask = popxl.constant(np.triu(np.full((n, n), -np.inf, np.float32), 1), qkv.dtype)
    probs = ops.softmax(query @ key.transpose((0, 1, 3, 2)) * 0.25 + mask, axis=-1)
    if p:
        probs = ops.dropout(probs, seed, p)
    return (probs @ value).transpose((0, 2, 1, 3)).reshape((-1, heads * D))[:, : H * D]
