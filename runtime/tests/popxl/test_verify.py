"""verify accepts what the API builds and names the op behind each kind of damage."""

from collections.abc import Callable
from typing import Any

import numpy as np
import popxl
import pytest
from popxl import TensorSpec, ops
from popxl.errors import GraphError
from popxl.extensions import verify
from popxl.transforms import autodiff

X = TensorSpec((2, 3), popxl.float32)


def inner(x: popxl.Tensor, total: popxl.TensorByRef) -> popxl.Tensor:
    ops.add_(total, x)
    return ops.exp(x)


def program() -> popxl.Ir:
    """Variables, constants, calls by reference, repeats, conditionals, streams, remote rows,
    gradients.
    """
    ir = popxl.Ir()
    with ir.main_graph:
        x = ops.host_load(popxl.h2d_stream((2, 3), popxl.float32))
        v = popxl.variable(np.zeros((2, 3), np.float32), name="v")
        called = ir.create_graph(inner, X, X)
        y, *_ = ops.call(called, x, v)
        step = ir.create_graph(lambda a: ops.sin(ops.sin(a)), X)
        (y,) = ops.repeat(step, 3, y)
        once = ir.create_graph(lambda a: ops.sin(ops.sin(a)), X)
        (y,) = ops.conditional(popxl.constant(True), once, step, [y], [y])
        other = ir.create_graph(lambda a: ops.sin(ops.sin(a)), X)
        site = ops.call_with_info(other, y)
        info = autodiff(other)
        (dy,) = ops.call(info.graph, y, inputs_dict=info.inputs_dict(site))
        buffer = popxl.remote_buffer((2, 3), popxl.float32, 2)
        ops.remote_store(buffer, 0, dy)
        ops.host_store(popxl.d2h_stream((2, 3), popxl.float32), ops.remote_load(buffer, 0))
    return ir


def test_a_program_built_through_the_api_is_well_formed() -> None:
    ir = program()
    verify(ir)
    for graph in ir.graphs:
        verify(graph)


def find(ir: popxl.Ir, name: str) -> Any:
    return next(op for graph in ir.graphs for op in graph.ops if op.definition.name == name)


def wrong_result(ir: popxl.Ir) -> None:
    find(ir, "exp").outputs[0]._spec = TensorSpec((3, 2), popxl.float32)


def wrong_dtype(ir: popxl.Ir) -> None:
    find(ir, "sin").outputs[0]._spec = TensorSpec((2, 3), popxl.float16)


def foreign_operand(ir: popxl.Ir) -> None:
    op = find(ir, "exp")
    op.set_argument("t", ir.main_graph.ops[0].outputs[0])


def use_before_definition(ir: popxl.Ir) -> None:
    graph = find(ir, "sin").graph
    graph._ops.reverse()


def missing_op(ir: popxl.Ir) -> None:
    graph = find(ir, "sin").graph
    graph._ops.pop()


def missing_input(ir: popxl.Ir) -> None:
    op = find(ir, "call")
    op.set_argument("inputs", op.arguments["inputs"][:1])


def wrong_input(ir: popxl.Ir) -> None:
    op = find(ir, "call")
    with ir.main_graph:
        flat = popxl.constant(np.zeros(6, np.float32), name="flat")
    op.set_argument("inputs", (flat, op.arguments["inputs"][1]))


def operands_that_do_not_fit(ir: popxl.Ir) -> None:
    find(ir, "add_").graph._inputs[0]._spec = TensorSpec((6,), popxl.float32)


def unknown_call(ir: popxl.Ir) -> None:
    find(ir, "call").arguments["graph"]._call_sites.clear()


def missing_result(ir: popxl.Ir) -> None:
    find(ir, "call")._outputs.pop()


def unmarked_body(ir: popxl.Ir) -> None:
    find(ir, "repeat").arguments["graph"]._is_body = False


def reference_to_no_input(ir: popxl.Ir) -> None:
    graph = find(ir, "exp").graph
    graph._by_ref_inputs.add(graph.outputs[0])


def other_name(ir: popxl.Ir) -> None:
    find(ir, "exp").outputs[0]._name = "other"


def input_twice(ir: popxl.Ir) -> None:
    graph = find(ir, "sin").graph
    graph._inputs.append(graph._inputs[0])


def recursion(ir: popxl.Ir) -> None:
    with ir.main_graph:
        first = ir.create_empty_graph("first")
        second = ir.create_graph(lambda: ops.call(first))
    with first:
        ops.call(second)


def deep_loop(ir: popxl.Ir) -> None:
    find(ir, "repeat").arguments["graph"]._inputs[0]._spec = TensorSpec((2, 3), popxl.float16)


DAMAGE = [
    (
        wrong_result,
        r"%exp: float32\[3, 2\] in %exp = exp\(%x\) of graph 'inner_subgraph\(0\)', built at .*test_verify.py",
    ),
    (wrong_dtype, r"expected float32\[2, 3\], as inferred|expected float16\[2, 3\], as inferred"),
    (foreign_operand, "operand %.* of graph 'main' .* expected a tensor of the op's graph"),
    (use_before_definition, "expected one that is made before it is used"),
    (missing_op, "got output %sin__1 of graph .* expected a tensor that an op there makes"),
    (missing_input, "got 1 inputs for graph 'inner_subgraph\\(0\\)'"),
    (
        wrong_input,
        r"%flat: float32\[6\] for input %x of graph 'inner_subgraph\(0\)' .* expected float32\[2, 3\]",
    ),
    (
        operands_that_do_not_fit,
        r"%add = add_\(%total, %x\) of graph .* operands that the op accepts \(add: .*broadcast",
    ),
    (unknown_call, "expected it among that graph's call sites"),
    (missing_result, "got 0 results"),
    (unmarked_body, "which is not a body"),
    (reference_to_no_input, "got by-reference tensor %exp"),
    (other_name, "got tensor %other of graph .* under the name 'exp'"),
    (input_twice, "got input %a of graph"),
    (recursion, "which calls itself"),
    (deep_loop, r"expected float16\[2, 3\]"),
]


@pytest.mark.parametrize("damage, words", DAMAGE, ids=[d.__name__ for d, _ in DAMAGE])
def test_damage_is_found_and_named(damage: Callable[[popxl.Ir], None], words: str) -> None:
    ir = program()
    damage(ir)
    with pytest.raises(GraphError, match=f"verify: .*({words})"):
        verify(ir)
