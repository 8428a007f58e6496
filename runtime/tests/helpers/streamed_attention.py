"""A program that trains through causal attention."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import popxl
import popxl_addons as addons
from popxl import Tensor, ops

Build = Callable[[popxl.Ir], Sequence[Tensor]]


def causal(sequence: int, hidden: float = -np.inf) -> np.ndarray:
    return np.triu(np.full((sequence, sequence), hidden, np.float32), k=1)


def numbers(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def attend(
    x: Tensor, w: Tensor, heads: int, mask: np.ndarray, seed: Any = None, scale: float = 0.3
) -> Tensor:
    """[batch, sequence, width] -> the same: attention to queries, keys and values that one product
    makes.
    """
    batch, sequence, width = x.shape
    qkv = x.reshape((-1, width)) @ w
    query, key, value = (
        t.reshape((batch, sequence, heads, width // heads)).transpose((0, 2, 1, 3))
        for t in ops.split(qkv, 3, axis=1)
    )
    probs = ops.softmax(
        query @ key.transpose((0, 1, 3, 2)) * scale + popxl.constant(mask, x.dtype, "mask"), axis=-1
    )
    if seed is not None:
        probs = ops.dropout(probs, seed, 0.2)
    return (probs @ value).transpose((0, 2, 1, 3)).reshape(x.shape)


def training(
    dtype: popxl.dtype,
    shape: tuple[int, ...] = (2, 6, 16),
    heads: int = 2,
    mask: Any = None,
    seed: bool = False,
    micro_batches: int = 1,
    is_loop: bool = False,
    recomputing: bool = True,
) -> Build:
    """Result, input's gradient and sum of weight gradients over some micro-batches of one layer."""

    def layer(x: Tensor, w: Tensor) -> Tensor:
        key = popxl.constant(np.array([3, 4], np.uint32)) if seed else None
        return attend(x, w, heads, causal(shape[1]) if mask is None else mask, key)

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        w = popxl.variable(
            numbers(shape[2], 3 * shape[2], seed=1) / math.sqrt(shape[2]), dtype, name="w"
        )
        total = popxl.variable(np.zeros(w.shape, np.float32), dtype, name="total")
        x, dy = (popxl.variable(numbers(*shape, seed=i), dtype) for i in (2, 3))
        graph = ir.create_graph(layer, x, w)
        grad = addons.autodiff(addons.GraphWithNamedArgs(graph))
        if recomputing:
            grad = addons.recompute_graph(grad)

        def step(x: Tensor, dy: Tensor, w: Tensor, total: popxl.TensorByRef) -> list[Tensor]:
            call = ops.call_with_info(graph, x, w)
            dx, dw = ops.call(grad.graph, dy, inputs_dict=grad.grad_graph_info.inputs_dict(call))
            ops.add_(total, dw)
            return [call.outputs[0], dx]

        if is_loop:
            y, dx = ops.repeat(
                ir.create_graph(step, x, dy, w, total), micro_batches, x, dy, w, total
            )
            return [y, dx, total]
        results = []
        for _ in range(micro_batches):
            x, dy = step(x, dy, w, total)
            results += [x, dy]
        return [*results, total]

    return build
