"""Moving ops into a graph of their own."""

import numpy as np
import popxl
import pytest
import torch
from helpers.interpreted import run_graph
from popxl import TensorSpec, ops
from popxl.errors import GraphError
from popxl.extensions import to_text, verify
from popxl.transforms import autodiff
from popxl.transforms.outline import outline

X = TensorSpec((2, 3), popxl.float32)


@pytest.fixture
def graph() -> popxl.Graph:
    """total += tanh(2 x); total *= y."""
    with popxl.Ir().main_graph as main:
        inner = main.ir.create_graph(lambda t: ops.tanh(t) * ops.exp(t), X)

        def build(x: popxl.Tensor, y: popxl.Tensor, total: popxl.TensorByRef) -> None:
            with popxl.name_scope("layer"):
                twice = ops.mul(x, popxl.constant(2.0, popxl.float32, "two"))
            ops.add_(total, ops.call(inner, twice)[0])
            popxl.ops.var_updates.accumulate_(total, y)

        return main.ir.create_graph(build, X, X, X)


def run(graph: popxl.Graph, *values: torch.Tensor) -> None:
    run_graph(graph, list(values))


def test_moved_ops_write_to_the_tensors_they_wrote_to_before(graph: popxl.Graph) -> None:
    body, inputs = outline(graph, graph.ops, "body")
    verify(body)
    assert (
        graph.ops == () and body.outputs == () and {t.name for t in inputs} == {"x", "y", "total"}
    )
    assert set(body.inputs) == set(inputs) == body._by_ref_inputs and set(inputs.values()) <= set(
        graph.inputs
    )
    with graph:
        ops.repeat(body, 2, inputs_dict=inputs)
    verify(graph.ir)
    x, y = (
        torch.rand(2, 3, generator=torch.manual_seed(0)),
        torch.rand(2, 3, generator=torch.manual_seed(1)),
    )
    total = torch.zeros(2, 3)
    run(graph, x, y, total)
    torch.testing.assert_close(total, 2 * (torch.tanh(2 * x) * torch.exp(2 * x) + y))


def test_moved_ops_and_tensors_keep_their_identity_names_and_lines(graph: popxl.Graph) -> None:
    before, moved = to_text(graph).splitlines()[1:], graph.ops
    names = [t.name for op in moved for t in op.outputs]
    body, _ = outline(graph, moved, "body")
    assert body.ops == moved and [t.name for op in body.ops for t in op.outputs] == names
    assert [line for line in to_text(body).splitlines()[1:] if "=" in line] == [
        line for line in before if "=" in line
    ]
    assert all(t in body and t not in graph for op in moved for t in op.outputs)
    with (
        graph,
        pytest.raises(
            GraphError, match="from graph 'body_subgraph.*; expected a tensor of the current graph"
        ),
    ):
        ops.exp(moved[0].outputs[0])


def test_a_moved_call_still_grows_with_the_graph_it_calls(graph: popxl.Graph) -> None:
    (call,) = [op for op in graph.ops if op.definition.name == "call"]
    body, inputs = outline(graph, graph.ops, "body")
    autodiff(call.arguments["graph"])
    assert len(call.outputs) > 1 and all(t in body for t in call.outputs)
    with graph:
        ops.call(body, inputs_dict=inputs)
    verify(graph.ir)


def test_some_of_the_ops_may_move() -> None:
    with popxl.Ir().main_graph as main:
        v = popxl.variable(np.zeros(3, np.float32))
        one = v + 1
        kept = len(main.ops)
        ops.add_(v, ops.exp(one))
        body, inputs = outline(main, main.ops[kept:], "body")
        assert [op.definition.name for op in body.ops] == ["exp", "add_"] and set(
            inputs.values()
        ) == {v, one}
        ops.call(body, inputs_dict=inputs)
        verify(main.ir)


def test_tensors_that_share_storage_outside_share_it_inside() -> None:
    """v, a view of it, and the result of writing to it in place: one input, and every write is seen
    by all.
    """
    with popxl.Ir().main_graph as main, popxl.in_sequence():
        v = popxl.variable(np.zeros((2, 3), np.float32), name="v")
        row = ops.slice_(v, 0, 1, axis=0).reshape_((3,))
        written = ops.add_(v, popxl.constant(np.ones((2, 3), np.float32)))
        seen = popxl.d2h_stream((2, 3), popxl.float32)
        kept = len(main.ops)
        ops.add_(row, popxl.constant(np.ones(3, np.float32)))
        ops.var_updates.accumulator_scale_(written, 2.0)
        body, inputs = outline(main, main.ops[kept:], "body")
        assert list(inputs.values()) == [v]
        ops.repeat(body, 2, inputs_dict=inputs)
        ops.host_store(seen, v)
        verify(main.ir)
    with popxl.Session(main.ir) as session:
        np.testing.assert_array_equal(session.run()[seen], [[10] * 3, [4] * 3])


def test_ops_whose_results_are_needed_outside_or_earlier_stay() -> None:
    with popxl.Ir().main_graph as main:
        graph = main.ir.create_graph(lambda x: ops.exp(ops.sin(x)), X)
        sin, exp = graph.ops
        with pytest.raises(
            GraphError, match="which the outputs of graph .* needs, among the results to move"
        ):
            outline(graph, [sin, exp], "body")
        with pytest.raises(
            GraphError, match="got %sin, which %exp = exp.* needs, among the results"
        ):
            outline(graph, [sin], "body")
        x = popxl.variable(np.zeros(3, np.float32))
        first = ops.exp(x)
        ops.exp(first)
        with pytest.raises(GraphError, match="before the op that makes %exp; expected it after"):
            outline(main, reversed(main.ops), "body")
    verify(main.ir)
