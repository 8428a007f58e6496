"""Emitting a graph's ops again elsewhere, and removing what nothing needs."""

from typing import Any

import numpy as np
import popxl
import pytest
import torch
from helpers.interpreted import run_graph
from popxl import TensorSpec, ops
from popxl.context import _execution_context
from popxl.errors import GraphError
from popxl.extensions import to_text, verify
from popxl.transforms import autodiff, clone_ops, prune
from popxl.transforms.clone import clone_op

X = TensorSpec((2, 3), popxl.float32)
FROM_HOST = popxl.ExecutionContext.WeightsFromHostFragment


def body(x: popxl.Tensor, total: popxl.TensorByRef) -> popxl.Tensor:
    with popxl.name_scope("layer"):
        y = ops.mul(x, popxl.constant(2.0, popxl.float32))
    ops.add_(total, y)
    return ops.exp(y)


@pytest.fixture
def graph() -> popxl.Graph:
    with popxl.Ir().main_graph as main:
        return main.ir.create_graph(body, X, X)


def cloned(graph: popxl.Graph) -> popxl.Graph:
    """A graph with the same inputs and ops."""

    def again(x: popxl.Tensor, total: popxl.TensorByRef) -> list[popxl.Tensor]:
        values = clone_ops(graph, dict(zip(graph.inputs, (x, total))))
        return [values[t] for t in graph.outputs]

    with graph.main_graph:
        return graph.ir.create_graph(again, *graph.inputs)


def test_cloned_ops_compute_the_same_and_leave_the_original_as_it_was(graph: popxl.Graph) -> None:
    before = to_text(graph)
    copy = cloned(graph)
    assert to_text(graph) == before
    verify(graph.ir)
    for g in (graph, copy):
        x, total = torch.rand(2, 3, generator=torch.manual_seed(0)), torch.ones(2, 3)
        [y] = run_graph(g, [x, total])
        torch.testing.assert_close(y, torch.exp(2 * x))
        torch.testing.assert_close(total, 1 + 2 * x)


def test_cloned_ops_keep_names_scopes_and_lines(graph: popxl.Graph) -> None:
    copy = cloned(graph)
    assert to_text(copy).splitlines()[1:] == to_text(graph).splitlines()[1:]
    assert [(o.name, o.source) for o in copy.ops] == [(o.name, o.source) for o in graph.ops]


def test_cloned_ops_run_when_the_original_runs_and_are_where_it_is() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.constant(np.ones(3, np.float32))
        with _execution_context(FROM_HOST), popxl.ipu(1), popxl.io_tiles():
            ops.exp(x)
        (op,) = ir.main_graph.ops
        copy = clone_op(op, lambda t: t)
    assert (copy.execution, copy.ipu, copy.io_tiles) == (FROM_HOST, 1, True)


def test_an_input_without_a_tensor_is_an_error(graph: popxl.Graph) -> None:
    with graph.main_graph, pytest.raises(GraphError, match="clone_ops: got no tensor for %x"):
        clone_ops(graph, {})


def test_calls_are_cloned_as_calls_and_grow_with_the_graph() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        inner = ir.create_graph(lambda x: ops.sin(ops.sin(x)), X)
        outer = ir.create_graph(lambda x: ops.call(inner, x), X)
        copy = ir.create_graph(
            lambda x: clone_ops(outer, {outer.inputs[0]: x})[outer.outputs[0]], X
        )
    autodiff(inner)
    verify(ir)
    assert [len(g.ops[0].outputs) for g in (outer, copy)] == [2, 2]


def test_prune_removes_what_neither_outputs_nor_references_nor_effects_need() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        stream = popxl.d2h_stream((2, 3), popxl.float32)
        inner = ir.create_graph(lambda x: ops.exp(x), X)

        def busy(x: popxl.Tensor, seen: popxl.TensorByRef) -> popxl.Tensor:
            ops.call(inner, ops.mul(x, popxl.constant(3.0, popxl.float32)))
            kept = ops.add(x, x)
            flat = ops.reshape_(kept, (6,))
            ops.add_(flat, popxl.constant(1.0, popxl.float32))
            ops.add_(ops.reshape_(seen, (6,)), flat)
            ops.add_(ops.exp(x), x)
            ops.host_store(stream, ops.sin(x))
            return kept

        graph = ir.create_graph(busy, X, X)
    x = torch.rand(2, 3)
    prune(graph)
    verify(ir)
    assert [o.definition.name for o in graph.ops] == [
        "add",
        "reshape_",
        "add_",
        "reshape_",
        "add_",
        "sin",
        "host_store",
    ]
    assert len(graph.constants) == 1 and inner._call_sites == []
    assert not any(t.name.startswith(("exp", "mul", inner.name)) for t in graph.tensors)
    seen: Any = torch.zeros(2, 3)
    graph._ops = graph._ops[:-1]  # without the store, which needs a session
    [y] = run_graph(graph, [x, seen])
    torch.testing.assert_close(y, 2 * x + 1)
    torch.testing.assert_close(seen, 2 * x + 1)


def test_prune_keeps_calls_that_write_by_reference() -> None:
    ir = popxl.Ir()

    def count(n: popxl.TensorByRef) -> None:
        ops.add_(n, popxl.constant(1.0, popxl.float32))

    def reads(n: popxl.TensorByRef) -> popxl.Tensor:
        return ops.exp(n)

    with ir.main_graph:
        counting, reading = (
            ir.create_graph(count, TensorSpec((), popxl.float32)),
            ir.create_graph(reads, TensorSpec((), popxl.float32)),
        )

        def both(n: popxl.TensorByRef) -> None:
            ops.call(counting, n)
            ops.call(reading, n)

        graph = ir.create_graph(both, TensorSpec((), popxl.float32))
    prune(graph)
    assert [o.arguments["graph"] for o in graph.ops] == [counting]


def test_variables_of_the_main_graph_keep_their_updates() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(np.zeros(3, np.float32), name="v")
        ops.add_(v, popxl.constant(np.ones(3, np.float32)))
        ops.exp(v)
    prune(ir.main_graph)
    assert [o.definition.name for o in ir.main_graph.ops] == ["add_"]
