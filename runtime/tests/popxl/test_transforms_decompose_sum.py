"""Sums of gradients are chains of additions, which decompose_sum promises."""

from functools import reduce

import popxl
import pytest
import torch
from helpers.gradient_programs import gradients
from popxl import TensorSpec, ops
from popxl.errors import GraphError
from popxl.extensions import to_text
from popxl.transforms import autodiff, decompose_sum

X = TensorSpec((3,), popxl.float32)


def test_sums_of_gradients_are_chains_and_the_graph_is_returned() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        graph = ir.create_graph(
            lambda x: reduce(ops.add, [ops.sin(x), ops.exp(x), ops.tanh(x), ops.mul(x, x)]), X
        )
    info = autodiff(graph)
    listing = to_text(info.graph)
    assert decompose_sum(info.graph) is info.graph
    sums = [o for o in info.graph.ops if o.definition.name == "add"]
    assert len(sums) == 4  # five uses of x
    for before, after in zip(sums, sums[1:]):
        assert before.outputs[0] in after.inputs
    assert to_text(info.graph) == listing
    x = torch.rand(3)
    [dx] = gradients(ir, graph, info, [x], [torch.ones(3)])
    torch.testing.assert_close(dx, x.cos() + x.exp() + 1 - x.tanh() ** 2 + 2 * x)


def test_something_else_than_a_graph_is_refused() -> None:
    with pytest.raises(GraphError, match="decompose_sum: got str; expected a Graph"):
        decompose_sum("graph")  # type: ignore[arg-type]
