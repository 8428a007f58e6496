"""Graphs as programs look at them through the native layer's names."""

import numpy as np
import popart
import popart._internal.ir as _ir
import popxl
import pytest
from popxl import ops
from popxl.native_names import SPECIAL
from popxl.op_definition import OPS


def test_ops_of_a_graph_are_listed_in_order_with_the_native_names_of_their_kinds() -> None:
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(np.ones((2, 2), np.float32))
        square = ir.create_graph(lambda t: t @ t, x)
        (y,) = ops.call(square, x)
        y += 1
        total = ops.sum(y.transpose_(), 0, keepdims=True)
        ops.host_store(popxl.d2h_stream(total.shape, total.dtype), total)
    main = ir.main_graph._pb_graph
    kinds = [op.opType() for op in main.getOps()]
    assert kinds == ["Call", "AddLhsInplace", "TransposeInplace", "ReduceSum", "HostStore"]
    assert main.getOpSchedule() == main.getOpSchedule(True) == main.getOps()
    assert [op.opType() for op in square._pb_graph.getOps()] == ["MatMul"]


def test_an_op_is_an_instance_of_the_native_class_of_its_kind() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.ones((2, 2), np.float32))
        ops.negate(x @ x + x)
    product, total, negative = ir.main_graph._pb_graph.getOps()
    assert isinstance(product, _ir.op.MatMulOp) and not isinstance(product, _ir.op.AddOp)
    assert isinstance(total, _ir.op.AddOp) and isinstance(negative, _ir.op.NegateOp)
    assert isinstance(total, _ir.op.Op) and not isinstance(x, _ir.op.Op)
    with pytest.raises(AttributeError, match="got 'Add'; expected the class of a kind of op"):
        _ = _ir.op.Add


@pytest.mark.parametrize(
    ("build", "kind"),
    [
        (lambda t, s: ops.repeat(s, 2, t), "Loop"),
        (lambda t, s: ops.conditional(popxl.constant(True), s, s, [t], [t]), "If"),
        (lambda t, s: ops.var_updates.accumulate_(t, t + t), "Accumulate"),
        (lambda t, s: ops.init((2,), popxl.float32), "Init"),
        (lambda t, s: ops.scaled_add_(t, t + t), "ScaledAddLhsInplace"),
        (lambda t, s: ops.collectives.replicated_all_reduce_(t), "ReplicatedAllReduceInplace"),
        (lambda t, s: -t, "Neg"),
        (lambda t, s: ops.relu_(t), "ReluInplace"),
        (lambda t, s: ops.isnan(t), "IsNaN"),
    ],
)
def test_a_hook_is_told_the_native_name_of_the_kind(build, kind) -> None:
    ir = popxl.Ir()
    seen: list[str] = []
    with ir.main_graph:
        t = popxl.variable(np.ones(2, np.float32))
        same = ir.create_graph(lambda x: x * 1.0, t)
        ir.main_graph.register_op_created_hook(lambda op: seen.append(op.opType()))
        build(t, same)
    assert seen[-1] == kind


def test_the_gradient_of_a_graph_that_is_marked_has_to_be_given() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(2.0)
        square = ir.create_graph(lambda t: t * t, x)
        assert square._pb_graph.getCanBeRecursivelyAutodiffed()
        square._pb_graph.setCanBeRecursivelyAutodiffed(False)
        assert not square._pb_graph.getCanBeRecursivelyAutodiffed()
        outer = ir.create_graph(lambda t: ops.call(square, t)[0] + 1.0, x)
        with pytest.raises(popart.popart_exception, match="called_graphs_grad_info"):
            popxl.transforms.autodiff(outer)
        given = {square: popxl.transforms.autodiff(square)}
        gradient = popxl.transforms.autodiff(outer, called_graphs_grad_info=given)
    assert given[square].graph in gradient.graph.called_graphs


def test_every_special_name_is_of_an_op() -> None:
    assert SPECIAL.keys() <= OPS.keys()
