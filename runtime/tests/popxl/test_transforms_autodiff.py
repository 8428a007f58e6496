"""The contract of autodiff: connections, names, what it appends to the forward graph, and what it
refuses.
"""

from typing import Any

import numpy as np
import popxl
import pytest
import torch
from helpers.gradient_programs import gradients
from helpers.interpreted import run_graph
from popart import popart_exception
from popxl import TensorSpec, ops
from popxl.errors import GraphError
from popxl.extensions import to_text, verify
from popxl.opdef import OPS, alias, op
from popxl.transforms import autodiff
from popxl.transforms.autodiff import ExpectedConnection, ExpectedConnectionType, GradGraphInfo

X = TensorSpec((2, 3), popxl.float32)
W = TensorSpec((3, 4), popxl.float32)
B = TensorSpec((4,), popxl.float32)
FWD, GRAD = ExpectedConnectionType.Fwd, ExpectedConnectionType.FwdGrad


@pytest.fixture
def ir() -> popxl.Ir:
    return popxl.Ir()


def graph_of(ir: popxl.Ir, fn: Any, *specs: Any) -> popxl.Graph:
    with ir.main_graph:
        return ir.create_graph(fn, *specs)


def linear(x: popxl.Tensor, w: popxl.Tensor, b: popxl.Tensor) -> popxl.Tensor:
    return ops.tanh(ops.add(ops.matmul(x, w), b))


def kinds(info: GradGraphInfo) -> tuple[Any, ...]:
    return tuple((c.connection_type, c.fwd_tensor.name) for c in info.expected_inputs)


def op_names(graph: popxl.Graph) -> list:
    return [o.definition.name for o in graph.ops]


# Connections


def test_inputs_are_provided_gradients_then_forward_values_and_outputs_the_required_gradients(
    ir: popxl.Ir,
) -> None:
    graph = graph_of(ir, linear, X, W, B)
    x, w, b = graph.inputs
    info = autodiff(graph)
    assert kinds(info) == ((GRAD, "tanh"), (FWD, "x"), (FWD, "w"), (FWD, "tanh"))
    assert info.inputs == (graph.outputs[0], x, w, graph.outputs[0])
    assert info.outputs == (x, w, b) and all(
        c.connection_type is GRAD for c in info.expected_outputs
    )
    assert info.forward_graph is graph and len(info.graph.inputs) == 4
    assert [t.spec for t in info.graph.outputs] == [X, W, B]
    assert graph.outputs == info.inputs[:1]  # its output is all that was needed beyond the inputs


def test_outputs_follow_grads_required(ir: popxl.Ir) -> None:
    graph = graph_of(ir, linear, X, W, B)
    x, _, b = graph.inputs
    info = autodiff(graph, grads_required=[b, x])
    assert info.outputs == (b, x)
    # only the gradient of w needs the value of x
    assert "x" not in [name for kind, name in kinds(info)]


def test_gradients_are_named_after_forward_tensors(ir: popxl.Ir) -> None:
    graph = graph_of(ir, lambda x, y: ops.add(x, y), X, X)
    info = autodiff(graph)
    assert [t.name for t in info.graph.inputs] == ["Gradient___add"]
    assert [t.name for t in info.graph.outputs] == ["Gradient___x", "Gradient___y"]
    assert all(t.id.startswith(info.graph.name) for t in info.graph.outputs)


def test_gradient_graph_is_named_after_the_forward_graph_whatever_scope_is_open(
    ir: popxl.Ir,
) -> None:
    with ir.main_graph, popxl.name_scope("block"):
        graph = ir.create_graph(linear, X, W, B)
        info = autodiff(graph)
    assert info.graph.name == "block/linear_grad_subgraph(0)"


def test_gradient_ops_carry_scope_and_line_of_the_forward_op(ir: popxl.Ir) -> None:
    def scoped(x: popxl.Tensor) -> popxl.Tensor:
        with popxl.name_scope("layer"):
            return ops.exp(x)

    graph = graph_of(ir, scoped, X)
    info = autodiff(graph)
    assert info.graph.ops[0].name == "layer/mul"
    assert info.graph.ops[0].source == graph.ops[0].source


def test_explicit_provided_gradients_are_all_kept_in_order(ir: popxl.Ir) -> None:
    graph = graph_of(ir, lambda x, w: (ops.exp(x), ops.exp(w)), X, W)
    first, second = graph.outputs
    info = autodiff(graph, grads_provided=[second, first], grads_required=[graph.inputs[0]])
    assert kinds(info)[:2] == ((GRAD, second.name), (GRAD, first.name))


def test_an_index_that_is_returned_may_be_given_a_gradient_which_goes_nowhere(
    ir: popxl.Ir,
) -> None:
    graph = graph_of(ir, lambda x: (ops.tanh(x), ops.argmax(x, 1)), X)
    info = autodiff(graph, grads_provided=graph.outputs)
    assert info.inputs[:2] == graph.outputs[:2]
    assert info.graph.inputs[1].spec == graph.outputs[1].spec
    assert op_names(info.graph) == op_names(autodiff(graph, graph.outputs[:1]).graph)


@pytest.mark.parametrize("outer", [False, True], ids=["called", "called by another graph"])
def test_a_tensor_that_is_returned_twice_gets_the_sum_of_both_gradients(
    ir: popxl.Ir, outer: bool
) -> None:
    graph = inner = graph_of(ir, lambda x: (y := ops.sin(x), y), X)
    if outer:  # with the inner gradient handed in, whose inputs are one for each of the two
        graph = graph_of(ir, lambda x: ops.call(inner, x), X)
    info = autodiff(inner)
    assert kinds(info)[:2] == ((GRAD, "sin"), (GRAD, "sin"))
    if outer:
        info = autodiff(graph, called_graphs_grad_info={inner: info})
    verify(ir)
    x, first, second = (torch.rand(2, 3, dtype=torch.float32) for _ in range(3))
    [dx] = gradients(ir, graph, info, [x], [first, second])
    torch.testing.assert_close(dx, x.cos() * (first + second))


def test_gradients_from_two_devices_add_up_on_one(ir: popxl.Ir) -> None:
    def parallel(x: popxl.Tensor) -> popxl.Tensor:
        with popxl.ipu(0):
            first = ops.sin(x)
        with popxl.ipu(1):
            second = ops.exp(x)
            return second * ops.ipu_copy(first, 1)

    graph = graph_of(ir, parallel, X)
    x = torch.rand(2, 3)
    [dx] = gradients(ir, graph, autodiff(graph), [x], [torch.ones(2, 3)])
    torch.testing.assert_close(dx, x.exp() * (x.sin() + x.cos()))


@pytest.mark.parametrize(
    "move",
    [ops.io_tile_copy, lambda t: ops.ipu_copy(t, 1, 0)],
    ids=["on other tiles", "on another device"],
)
@pytest.mark.parametrize("repeats", [False, True], ids=["used", "used in a loop"])
@pytest.mark.parametrize(
    "use",
    [
        lambda y: y * y,
        lambda y: y / y * 2.0,
        lambda y: y**3.0,
        lambda y: ops.add(y, y),
        *(ops.sin, ops.tanh, ops.gelu, lambda y: ops.softmax(y, 1)),
        lambda y: ops.max(y, 0, keepdims=True) * popxl.constant(np.ones((2, 1), np.float32)),
    ],
    ids=["mul", "div", "pow", "add", "sin", "tanh", "gelu", "softmax", "max"],
)
def test_operands_in_another_place_than_their_op_have_gradients(
    move: Any, repeats: bool, use: Any
) -> None:
    def gradient(move: Any) -> torch.Tensor:
        ir = popxl.Ir()
        body = graph_of(ir, lambda x: use(move(ops.exp(x))), X)
        graph = graph_of(ir, lambda x: ops.repeat(body, 2, x)[0], X) if repeats else body
        x = torch.arange(6.0).reshape(2, 3) / 6
        [dx] = gradients(ir, graph, autodiff(graph), [x], [x])
        verify(ir)
        return dx

    assert torch.equal(gradient(move), gradient(lambda t: t))


def test_an_input_that_nothing_depends_on_gets_zeros(ir: popxl.Ir) -> None:
    graph = graph_of(ir, lambda x, w: ops.exp(x), X, W)
    info = autodiff(graph)
    results = gradients(ir, graph, info, [torch.ones(2, 3), torch.ones(3, 4)], [torch.ones(2, 3)])
    assert torch.equal(results[1], torch.zeros(3, 4))


def test_gradient_of_an_output_that_is_an_input_passes_through(ir: popxl.Ir) -> None:
    graph = graph_of(ir, lambda x: x, X)
    info = autodiff(graph)
    dy = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(gradients(ir, graph, info, [torch.ones(2, 3)], [dy])[0], dy)
    assert info.graph.outputs[0].name == "Gradient___x"


def test_connections_are_equal_by_kind_and_tensor(ir: popxl.Ir) -> None:
    graph = graph_of(ir, linear, X, W, B)
    info, again = autodiff(graph), autodiff(graph)
    assert info.expected_outputs == again.expected_outputs
    assert info.expected_outputs.index(again.expected_outputs[2]) == 2
    assert len({*info.expected_outputs, *again.expected_outputs}) == 3
    assert ExpectedConnection.of_value(graph.inputs[0]) != ExpectedConnection.of_gradient(
        graph.inputs[0]
    )


def test_records_cannot_be_constructed() -> None:
    with pytest.raises(TypeError, match="constructor call"):
        ExpectedConnection()
    with pytest.raises(TypeError, match="constructor call"):
        GradGraphInfo()


# What is kept


def chain(x: popxl.Tensor) -> popxl.Tensor:
    return ops.sin(ops.sin(x))


def test_intermediates_become_outputs_of_the_graph_and_of_calls_made_before(ir: popxl.Ir) -> None:
    graph = graph_of(ir, chain, X)
    with ir.main_graph:
        x = popxl.constant(np.ones((2, 3), np.float32))
        site = ops.call_with_info(graph, x)
        returned = site.outputs
        info = autodiff(graph)
        assert len(returned) == 1 and len(graph.outputs) == len(site.outputs) == 2
        connected = info.inputs_dict(site)
    assert connected == {info.graph.inputs[1]: x, info.graph.inputs[2]: site.outputs[1]}
    verify(ir)


def test_differentiating_again_appends_nothing_and_expects_the_same_gradients(ir: popxl.Ir) -> None:
    graph = graph_of(ir, chain, X)
    info = autodiff(graph)
    outputs = graph.outputs
    again = autodiff(graph)
    assert graph.outputs == outputs
    assert again.expected_inputs == info.expected_inputs and again.graph is not info.graph


def test_views_and_constants_are_made_again_instead_of_kept(ir: popxl.Ir) -> None:
    def heads(x: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
        scaled = ops.mul(ops.transpose(w), popxl.constant(2.0, popxl.float32))
        return ops.matmul(x, ops.transpose(scaled))

    graph = graph_of(ir, heads, X, W)
    info = autodiff(graph)
    assert kinds(info) == ((GRAD, "matmul"), (FWD, "x"), (FWD, "mul"))
    assert len(graph.outputs) == 2 and len(info.graph.constants) == 1
    values = [torch.rand(2, 3), torch.rand(3, 4)]
    dx, dw = gradients(ir, graph, info, values, [torch.ones(2, 4)])
    torch.testing.assert_close(dx, torch.ones(2, 4) @ (2 * values[1]).T)
    torch.testing.assert_close(dw, 2 * values[0].T @ torch.ones(2, 4))


def test_a_small_slice_of_a_large_intermediate_is_kept_instead_of_the_whole(ir: popxl.Ir) -> None:
    def first_row(x: popxl.Tensor) -> popxl.Tensor:
        return ops.sin(ops.slice(ops.add(x, x), 0, 1, axis=0))

    graph = graph_of(ir, first_row, X)
    autodiff(graph)
    assert [t.shape for t in graph.outputs] == [(1, 3), (1, 3)]


def test_what_is_only_reshaped_is_kept_as_it_is_then(ir: popxl.Ir) -> None:
    def merged(x: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
        return ops.matmul(ops.sin(ops.transpose(x)).transpose().reshape((3, 2)), w)

    graph = graph_of(ir, merged, X, TensorSpec((2, 4), popxl.float32))
    info = autodiff(graph, grads_required=[graph.inputs[1]])
    assert kinds(info) == ((GRAD, "matmul"), (FWD, "sin_T_reshaped"))
    values = [torch.rand(2, 3), torch.rand(2, 4)]
    [dw] = gradients(ir, graph, info, values, [torch.ones(3, 4)])
    torch.testing.assert_close(dw, values[0].sin().reshape(3, 2).T @ torch.ones(3, 4))


@pytest.mark.parametrize("pieces_in_use, kept", [(3, (6, 3)), (2, (2, 3))])
def test_pieces_are_kept_in_one_where_all_of_them_are_used(
    pieces_in_use: int, kept: tuple[int, ...], ir: popxl.Ir
) -> None:
    def product(x: popxl.Tensor) -> popxl.Tensor:
        result, *rest = ops.split(ops.add(x, x), 3, axis=0)[:pieces_in_use]
        for piece in rest:
            result = ops.mul(result, ops.sin(piece))
        return result

    graph = graph_of(ir, product, TensorSpec((6, 3), popxl.float32))
    info = autodiff(graph)
    assert kept in [t.shape for t in graph.outputs[1:]]
    x = torch.rand(6, 3, requires_grad=True)
    first, *rest = (x + x).split(2)[:pieces_in_use]
    for piece in rest:
        first = first * piece.sin()
    [dx] = gradients(ir, graph, info, [x.detach()], [torch.ones(2, 3)])
    torch.testing.assert_close(dx, torch.autograd.grad(first.sum(), x)[0])


def test_only_ops_on_the_way_to_required_gradients_are_made(ir: popxl.Ir) -> None:
    graph = graph_of(ir, linear, X, W, B)
    info = autodiff(graph, grads_required=[graph.inputs[2]])
    assert "matmul" not in op_names(info.graph)
    assert set(info.graph.tensors) == {
        *info.graph.inputs,
        *(t for o in info.graph.ops for t in o.outputs),
        *info.graph.constants,
    }


def test_seeds_of_dropout_are_values_that_the_gradient_takes(ir: popxl.Ir) -> None:
    graph = graph_of(
        ir, lambda x, seed: ops.dropout(x, seed, p=0.5), X, TensorSpec((2,), popxl.uint32)
    )
    info = autodiff(graph, grads_required=[graph.inputs[0]])
    assert (FWD, "seed") in kinds(info) and len(graph.outputs) == 1
    seed = torch.tensor([3, 7], dtype=torch.uint32)
    [y] = run_graph(graph, [torch.ones(2, 3), seed])
    [dx] = gradients(ir, graph, info, [torch.ones(2, 3), seed], [torch.ones(2, 3)])
    assert torch.equal(y, dx)


def test_bodies_get_no_outputs_and_their_gradients_recompute(ir: popxl.Ir) -> None:
    graph = graph_of(ir, chain, X)
    with ir.main_graph:
        ops.repeat(graph, 2, popxl.constant(np.ones((2, 3), np.float32)))
    info = autodiff(graph)
    assert len(graph.outputs) == 1 and kinds(info) == ((GRAD, "sin__1"), (FWD, "x"))
    x = torch.rand(2, 3)
    [dx] = gradients(ir, graph, info, [x], [torch.ones(2, 3)])
    torch.testing.assert_close(dx, torch.cos(torch.sin(x)) * torch.cos(x))
    verify(ir)


# Called graphs


def test_called_graphs_are_differentiated_once_and_called_again(ir: popxl.Ir) -> None:
    inner = graph_of(ir, chain, X)
    graph = graph_of(ir, lambda x: ops.call(inner, *ops.call(inner, x))[0], X)
    infos = autodiff(graph, return_all_grad_graphs=True)
    assert set(infos) == {inner, graph}
    calls = [o for o in infos[graph].graph.ops if o.definition.name == "call"]
    assert [o.arguments["graph"] for o in calls] == [infos[inner].graph] * 2


def test_a_supplied_gradient_is_used_as_it_is(ir: popxl.Ir) -> None:
    inner = graph_of(ir, chain, X)
    by_hand = graph_of(ir, lambda dy: ops.mul(dy, popxl.constant(3.0, popxl.float32)), X)
    connections = (
        [ExpectedConnection.of_gradient(inner.outputs[0])],
        [ExpectedConnection.of_gradient(inner.inputs[0])],
    )
    supplied = GradGraphInfo.make(by_hand, inner, *connections)
    graph = graph_of(ir, lambda x: ops.call(inner, x)[0], X)
    info = autodiff(graph, called_graphs_grad_info={inner: supplied})
    assert len(inner.outputs) == 1
    assert torch.equal(
        gradients(ir, graph, info, [torch.ones(2, 3)], [torch.ones(2, 3)])[0],
        torch.full((2, 3), 3.0),
    )


def test_a_supplied_gradient_that_lacks_an_input_is_an_error_when_it_is_needed(
    ir: popxl.Ir,
) -> None:
    inner = graph_of(ir, linear, X, W, B)
    supplied = autodiff(inner, grads_required=[inner.inputs[1]])
    graph = graph_of(ir, lambda *ts: ops.call(inner, *ts)[0], X, W, B)
    info = autodiff(
        graph, grads_required=[graph.inputs[1]], called_graphs_grad_info={inner: supplied}
    )
    assert info.outputs == (graph.inputs[1],)
    with pytest.raises(GraphError, match="called_graphs_grad_info to return the gradient of %x"):
        autodiff(graph, grads_required=[graph.inputs[0]], called_graphs_grad_info={inner: supplied})


def test_gradients_of_called_graphs_ask_only_for_outputs_that_are_used(ir: popxl.Ir) -> None:
    inner = graph_of(ir, chain, X)
    autodiff(inner)  # appends an output that the caller never uses
    graph = graph_of(ir, lambda x: ops.call(inner, x)[0], X)
    infos = autodiff(graph, return_all_grad_graphs=True)
    assert [c.fwd_tensor for c in infos[inner].expected_inputs if c.connection_type is GRAD] == [
        inner.outputs[0]
    ]


def test_gradients_are_mapped_to_the_callers_tensors(ir: popxl.Ir) -> None:
    graph = graph_of(ir, linear, X, W, B)
    info = autodiff(graph)
    with ir.main_graph:
        x, w, b = (popxl.constant(np.ones(s.shape, np.float32)) for s in (X, W, B))
        fwd = ops.call_with_info(graph, x, w, b)
        bwd = ops.call_with_info(info.graph, fwd.outputs[0], inputs_dict=info.inputs_dict(fwd))
        assert info.fwd_graph_ins_to_grad_parent_outs(bwd) == dict(zip(graph.inputs, bwd.outputs))
        assert info.fwd_parent_ins_to_grad_parent_outs(fwd, bwd) == dict(
            zip((x, w, b), bwd.outputs)
        )
        with pytest.raises(
            TypeError, match="expected the CallSiteInfo of a call of 'linear_subgraph"
        ):
            info.inputs_dict(bwd)


def test_one_tensor_for_two_inputs_has_no_single_gradient_in_the_caller(ir: popxl.Ir) -> None:
    graph = graph_of(ir, lambda x, y: ops.mul(x, y), X, X)
    info = autodiff(graph)
    with ir.main_graph:
        x = popxl.constant(np.ones((2, 3), np.float32))
        fwd = ops.call_with_info(graph, x, x)
        bwd = ops.call_with_info(info.graph, x, inputs_dict=info.inputs_dict(fwd))
        with pytest.raises(GraphError, match="for two inputs of graph"):
            info.fwd_parent_ins_to_grad_parent_outs(fwd, bwd)


# Refusals


@op(name="rough_for_tests", differentiable=False)
def rough(t: popxl.Tensor) -> TensorSpec:
    return t.spec


@op(name="rough_view_for_tests", views=("t",))
def rough_view(t: popxl.Tensor) -> TensorSpec:
    return t.spec


rough_view_ = alias(rough_view)

for declared in (rough, rough_view, rough_view_):  # the table lists the product's ops
    del OPS[declared.definition.name]


def test_an_op_without_a_gradient_on_the_way_is_an_error_that_names_op_rule_and_file(
    ir: popxl.Ir,
) -> None:
    graph = graph_of(ir, lambda x, w: (rough(x), ops.exp(w)), X, W)
    with pytest.raises(
        popart_exception,
        match=r"%x: .*'rough_for_tests' is declared not differentiable .*rough_for_tests.vjp in .*py",
    ):
        autodiff(graph)
    assert autodiff(graph, grads_required=[graph.inputs[1]]).outputs == (graph.inputs[1],)


def test_an_op_without_a_gradient_is_an_error_however_far_it_is_from_the_input(
    ir: popxl.Ir,
) -> None:
    graph = graph_of(ir, lambda x: ops.sin(rough(ops.reshape(ops.exp(x), (3, 2)))), X)
    with pytest.raises(GraphError, match=r"%x: .*'rough_for_tests' is declared not differentiable"):
        autodiff(graph)
    both = graph_of(ir, lambda x: ops.add(rough(ops.exp(x)), ops.exp(x)), X)
    with pytest.raises(GraphError, match=r"%x: .*'rough_for_tests' is declared not differentiable"):
        autodiff(both)


def test_a_view_form_has_a_gradient_if_its_op_has(ir: popxl.Ir) -> None:
    graph = graph_of(ir, rough_view_, X)
    with pytest.raises(GraphError, match="'rough_view_for_tests' has none yet"):
        autodiff(graph)


def test_an_op_without_a_gradient_in_a_called_graph_only_matters_where_it_is_needed(
    ir: popxl.Ir,
) -> None:
    inner = graph_of(ir, lambda x, y: ops.add(rough(x), y), X, X)
    graph = graph_of(ir, lambda x, y: ops.call(inner, x, y)[0], X, X)
    x, y = graph.inputs
    assert autodiff(graph, grads_required=[y]).outputs == (y,)
    with pytest.raises(GraphError, match="'rough_for_tests' is declared not differentiable"):
        autodiff(graph, grads_required=[x])


def test_detach_stops_the_search_for_gradients(ir: popxl.Ir) -> None:
    graph = graph_of(ir, lambda x: ops.add(x, rough(ops.detach(x))), X)
    assert op_names(autodiff(graph).graph) == ["identity"]


def test_integers_have_no_gradient(ir: popxl.Ir) -> None:
    graph = graph_of(ir, lambda x, i: ops.gather(x, i), X, TensorSpec((4,), popxl.int32))
    with pytest.raises(
        popart_exception,
        match=r"%i: int32\[4\] .*in grads_required; expected a floating-point tensor",
    ):
        autodiff(graph)
    assert autodiff(graph, grads_required=graph.inputs[:1]).outputs == graph.inputs[:1]


def test_writing_in_place_is_refused_and_views_are_allowed(ir: popxl.Ir) -> None:
    def changes(x: popxl.Tensor) -> popxl.Tensor:
        y = ops.exp(x)
        ops.add_(y, x)
        return y

    def by_reference(x: popxl.TensorByRef) -> None:
        ops.add_(x, x)

    with pytest.raises(popart_exception, match="expected no op that writes in place"):
        autodiff(graph_of(ir, changes, X))
    inner = graph_of(ir, by_reference, X)

    def calls(x: popxl.Tensor) -> popxl.Tensor:
        ops.call(inner, x)
        return ops.exp(x)

    with pytest.raises(popart_exception, match="expected no op that writes in place"):
        autodiff(graph_of(ir, calls, X))
    views = graph_of(ir, lambda x: ops.concat_([ops.reshape_(x, (3, 2)), ops.transpose_(x)]), X)
    [dx] = gradients(
        ir, views, autodiff(views), [torch.rand(2, 3)], [torch.arange(12.0).reshape(6, 2)]
    )
    dy = torch.arange(12.0).reshape(6, 2)
    assert torch.equal(dx, dy[:3].reshape(2, 3) + dy[3:].T)


def test_foreign_tensors_and_the_main_graph_are_refused(ir: popxl.Ir) -> None:
    graph, other = graph_of(ir, chain, X), graph_of(ir, chain, X)
    with pytest.raises(
        ValueError, match="in grads_required; expected a tensor of graph 'chain_subgraph\\(0\\)'"
    ):
        autodiff(graph, grads_required=other.inputs)
    with pytest.raises(ValueError, match="in grads_provided; expected a tensor of graph"):
        autodiff(graph, grads_provided=other.outputs)
    with pytest.raises(GraphError, match="got the main graph"):
        autodiff(ir.main_graph)


def test_loads_in_a_body_cannot_be_recomputed(ir: popxl.Ir) -> None:
    with ir.main_graph:
        stream = popxl.h2d_stream((2, 3), popxl.float32, "data")

        def loads(x: popxl.Tensor, y: popxl.Tensor) -> Any:
            y = ops.host_load(stream)
            return ops.mul(x, y), y

        body = ir.create_graph(loads, X, X)
        ops.repeat(body, 2, *[popxl.constant(np.ones((2, 3), np.float32))] * 2)
    with pytest.raises(GraphError, match="expected values that can be computed again"):
        autodiff(body)


def test_a_rule_that_returns_another_shape_is_named(ir: popxl.Ir) -> None:
    original = rough.definition.vjp
    rough.definition.vjp = lambda dy, y, t: ops.sum(dy, axis=0)
    try:
        with pytest.raises(
            GraphError,
            match=r"got float32\[3\] from the gradient rule of rough_for_tests .*expected float32\[2, 3\]",
        ):
            autodiff(graph_of(ir, lambda x: rough(x), X))
        rough.definition.vjp = lambda dy, y, t: (dy, dy)
        with pytest.raises(
            GraphError, match="got 2 gradients from the rule of op 'rough_for_tests'"
        ):
            autodiff(graph_of(ir, lambda x: rough(x), X))
    finally:
        rough.definition.vjp = original


def test_a_frozen_program_cannot_be_differentiated(ir: popxl.Ir) -> None:
    graph = graph_of(ir, chain, X)
    ir._freeze()
    with pytest.raises(RuntimeError, match="Build a new Ir"):
        autodiff(graph)


def test_the_listing_of_a_gradient_graph_reads_like_the_formula(ir: popxl.Ir) -> None:
    graph = graph_of(ir, lambda x, y: ops.mul(ops.exp(x), y), X, X)
    assert to_text(autodiff(graph).graph).splitlines()[1:] == [
        "  %Gradient___exp: float32[2, 3] = mul(%Gradient___mul, %y)",
        "  %Gradient___y: float32[2, 3] = mul(%Gradient___mul, %exp)",
        "  %Gradient___x: float32[2, 3] = mul(%Gradient___exp, %exp)",
    ]
