"""What can be built and what can be executed: programs are built whatever numbers they hold, and
sessions refuse.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import popxl
import pytest
import torch
from helpers.addons_programs import run_program, store_all
from popart import popart_exception
from popxl import ops
from popxl.errors import DTypeError
from popxl.ops.var_updates import (
    accumulate_mean_,
    adam_updater,
    adam_var_update,
    adamax_updater,
    lamb_updater,
)
from popxl.planning import plan
from popxl.transforms import autodiff

FLOAT = popxl.TensorSpec((), popxl.float32)
INTEGERS = np.array([3, -1, 4, 1], np.int32)
WAYS = pytest.mark.parametrize("interpret", ["0", "1"], ids=["compiled", "interpreted"])


def integers(name: str = "whole") -> popxl.Tensor:
    return popxl.variable(INTEGERS, name=name)


def step() -> popxl.Tensor:
    return popxl.variable(1, popxl.uint32)


def seed() -> popxl.Tensor:
    return popxl.constant([1, 2], popxl.uint32)


FOR_FLOATS: list[tuple[str, Callable[[popxl.Tensor], Any]]] = [
    ("adam_updater", lambda t: adam_updater(t, t, t, step(), 0.1, 0.9, 0.999)),
    ("lamb_updater", lambda t: lamb_updater(t, t, t, step(), 0.1, 0.9, 0.999)),
    ("adamax_updater", lambda t: adamax_updater(t, t, t, step(), 0.1)),
    ("adam_var_update", lambda t: adam_var_update(t, t, popxl.variable(1), popxl.variable(1))),
    ("lamb_square", ops.lamb_square),
    ("dropout", lambda t: ops.dropout(t, seed(), 0.1)),
    ("gelu", ops.gelu),
    ("swish", ops.swish),
    ("softmax", lambda t: ops.softmax(t, 0)),
    ("mean", ops.mean),
    ("average_pool", lambda t: ops.average_pool(t.reshape((1, 1, 4)), (2,))),
    ("conv", lambda t: ops.conv(t.reshape((1, 1, 4)), t.reshape((1, 1, 4)), (1,), (0, 0), (1,))),
    ("layer_norm", lambda t: ops.layer_norm(t.reshape((1, 4)), t, t)),
]


@pytest.mark.parametrize(("name", "call"), FOR_FLOATS, ids=[name for name, _ in FOR_FLOATS])
def test_ops_for_floating_point_are_built_on_integers_and_refused_by_sessions(
    name: str, call: Any
) -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        graph = ir.create_graph(lambda: None)
        t = integers()
        call(t)
    assert graph.ir is ir
    wanted = rf"cannot execute .* in graph 'main', built at {__file__}:\d+: .*int32.*; expected floating point"
    with pytest.raises(DTypeError, match=wanted):
        popxl.Session(ir, "ipu_model")
    with pytest.raises(TypeError, match=wanted):
        plan(ir)


def test_what_is_refused_is_named_with_its_operands_the_called_graph_and_the_users_line() -> None:
    ir = popxl.Ir()

    def layer(x: popxl.Tensor) -> popxl.Tensor:
        return ops.gelu(x)

    with ir.main_graph:
        unused = ir.create_graph(layer, popxl.TensorSpec((2,), popxl.int32))
        graph = ir.create_graph(layer, popxl.TensorSpec((4,), popxl.int32))
        (result,) = ops.call(graph, integers())
    assert unused.outputs[0].dtype is popxl.int32 and result.shape == (4,)
    line = next(
        i
        for i, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "return ops.gelu(x)" in text
    )
    with pytest.raises(DTypeError) as caught:
        popxl.Session(ir, "cpu")
    said = str(caught.value)
    for words in (
        "gelu(%x)",
        f"graph '{graph.name}'",
        f"{__file__}:{line}",
        "int32[4]",
        "ops.cast",
    ):
        assert words in said, f"{words!r} is not in: {said}"


def test_what_no_graph_calls_is_not_refused() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        ir.create_graph(ops.gelu, popxl.TensorSpec((2,), popxl.int32))
        (stream,) = store_all([integers() + 1])
    with popxl.Session(ir, "cpu") as session:
        np.testing.assert_array_equal(session.run()[stream], INTEGERS + 1)


# Gradients of integers


@WAYS
def test_gradients_of_integers_are_built_and_run(
    interpret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPXL_INTERPRET", interpret)

    def inner(x: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
        return x * w

    def outer(x: popxl.Tensor, w: popxl.Tensor, b: popxl.Tensor) -> popxl.Tensor:
        graph = popxl.gcg().ir.create_graph(inner, x, w)
        (product,) = ops.call(graph, x, w)
        return product * x + b

    ir = popxl.Ir()
    with ir.main_graph:
        x, w, b = popxl.variable(3), popxl.variable(5), popxl.variable(7)
        graph = ir.create_graph(outer, x, w, b)
        info = autodiff(graph)
        call = ops.call_with_info(graph, x, w, b)
        gradients = ops.call(info.graph, popxl.constant(2), inputs_dict=info.inputs_dict(call))
        streams = store_all([*call.outputs[:1], *gradients])
    with popxl.Session(ir, "cpu") as session:
        results = session.run()
    assert [int(results[s]) for s in streams] == [3 * 5 * 3 + 7, 2 * 2 * 3 * 5, 2 * 3 * 3, 2]


def test_the_gradient_of_a_cast_integer_is_cast_back() -> None:
    def build(ir: popxl.Ir) -> Sequence[popxl.Tensor]:
        graph = ir.create_graph(
            lambda i: ops.cast(i, popxl.float32) * 2.5, popxl.TensorSpec((2,), popxl.int32)
        )
        info = autodiff(graph)
        assert info.graph.outputs[0].dtype is popxl.int32
        return ops.call(info.graph, popxl.constant([2.0, -3.0], popxl.float32))

    (di,) = run_program(build)
    np.testing.assert_array_equal(di, np.array([5, -7], np.int32))  # 5.0 and -7.5, truncated


def test_loops_give_integers_no_gradient_and_say_so() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        body = ir.create_graph(
            lambda n, x: (n * 2, x * 3), popxl.TensorSpec((), popxl.int32), FLOAT
        )
        graph = ir.create_graph(
            lambda n, x: ops.repeat(body, 2, n, x), popxl.TensorSpec((), popxl.int32), FLOAT
        )
        with pytest.raises(
            popart_exception, match=r"%n: int32\[\].* loops give integers no gradient"
        ):
            autodiff(graph)
        assert autodiff(graph, grads_required=graph.inputs[1:]).outputs == graph.inputs[1:]


def test_gradients_that_integers_do_not_have_are_built_and_refused_by_sessions() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        graph = ir.create_graph(lambda x: ops.tanh(x), popxl.TensorSpec((4,), popxl.int32))
        info = autodiff(graph)
        call = ops.call_with_info(graph, integers())
        ops.call(info.graph, integers(), inputs_dict=info.inputs_dict(call))
    with pytest.raises(DTypeError, match="tanh.*expected floating point"):
        popxl.Session(ir, "cpu")


def test_an_index_still_has_no_gradient_but_its_tensor_has() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        graph = ir.create_graph(
            ops.gather, popxl.TensorSpec((4, 2), popxl.float32), popxl.TensorSpec((3,), popxl.int32)
        )
        with pytest.raises(
            popart_exception,
            match=r"%indices: int32\[3\].* an index, a label or a seed has no gradient",
        ):
            autodiff(graph)
        assert autodiff(graph, grads_required=graph.inputs[:1]).outputs == graph.inputs[:1]


# Operands


WIDTHS = [
    (popxl.float16, popxl.float32),
    (popxl.float32, popxl.float16),
    (popxl.float16, popxl.bfloat16),
    (popxl.bfloat16, popxl.float32),
    (popxl.float64, popxl.float16),
]


@WAYS
@pytest.mark.parametrize("widths", WIDTHS, ids=[f"{a.name} @ {b.name}" for a, b in WIDTHS])
def test_products_of_two_widths_are_of_the_left_ones_and_summed_in_the_wider(
    widths: Any, interpret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPXL_INTERPRET", interpret)
    random = np.random.default_rng(0)
    exact = [
        torch.from_numpy(random.integers(-8, 8, shape) / 16) for shape in ((3, 40), (40, 5), (3, 5))
    ]
    lhs, rhs, dy = exact
    lhs.requires_grad_()
    rhs.requires_grad_()
    y = lhs @ rhs
    y.backward(dy)

    def build(ir: popxl.Ir) -> Sequence[popxl.Tensor]:
        a, b = (popxl.variable(t.detach().numpy(), of) for t, of in zip(exact, widths))
        graph = ir.create_graph(ops.matmul, a, b)
        assert graph.outputs[0].dtype is widths[0]
        info = autodiff(graph)
        call = ops.call_with_info(graph, a, b)
        gradients = ops.call(
            info.graph, popxl.constant(dy.numpy(), widths[0]), inputs_dict=info.inputs_dict(call)
        )
        assert [t.dtype for t in gradients] == list(widths)
        return [*call.outputs[:1], *gradients]

    for result, t, of in zip(run_program(build), (y, lhs.grad, rhs.grad), (widths[0], *widths)):
        wanted = (
            t.detach()
            .to(torch.float64 if of is popxl.float64 else getattr(torch, of.name))
            .to(torch.float64)
        )
        np.testing.assert_array_equal(result.astype(np.float64), wanted.numpy())


def test_products_of_integers_and_floating_point_are_refused_by_sessions() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        y = ops.matmul(
            popxl.variable(np.ones((2, 4), np.float32)), popxl.variable(np.ones((4, 3), np.int32))
        )
    assert y.dtype is popxl.float32 and y.shape == (2, 3)
    with pytest.raises(DTypeError, match="cannot execute .*matmul.* expected equal dtypes"):
        popxl.Session(ir, "cpu")


@pytest.mark.parametrize("update", [ops.dynamic_update, ops.dynamic_update_])
def test_updates_of_another_shape_than_the_slice_are_refused_by_sessions(update: Any) -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        t = popxl.variable(np.zeros((4, 3), np.float32), name="rows")
        index = popxl.variable([1], popxl.uint32)
        row = popxl.variable(np.ones((3,), np.float32), name="row")
        assert update(t, index, row, [0], [1], True).shape == (4, 3)
    with pytest.raises(ValueError, match=r"cannot execute .*%rows.*%row.*slice's shape \[1, 3\]"):
        popxl.Session(ir, "cpu")


def test_the_main_graph_takes_inputs_that_no_session_has_a_value_for() -> None:
    ir = popxl.Ir()
    with ir.main_graph as main:
        x = popxl.graph_input((2, 2), popxl.float32, "given", meta_shape=(4, 2))
        y = x + 1
    assert main.inputs == (x,) and x in main and y.meta_shape == (4, 2)
    with pytest.raises(
        ValueError,
        match=r"got input %given: float32\[2, 2\].* of the main graph, which has no value",
    ):
        popxl.Session(ir, "cpu")


@pytest.mark.parametrize(
    "site", [ops.call_with_info, lambda g, *x, **k: ops.repeat_with_info(g, 2, *x, **k)]
)
def test_a_call_may_be_built_without_inputs_that_no_session_has_a_value_for(site) -> None:
    def built(fn, inputs_dict=None) -> popxl.Ir:
        ir = popxl.Ir()
        with ir.main_graph:
            x = popxl.variable(np.ones(2, np.float32))
            graph = ir.create_graph(fn, x, x)
            given = {graph.inputs[1]: x} if inputs_dict else {}
            y = site(graph, *([] if given else [x]), inputs_dict=given, check_inputs=False)
            ops.host_store(popxl.d2h_stream((2,), popxl.float32), y.outputs[0])
        return ir

    with pytest.raises(
        ValueError, match=r"built at .*: got no value for input %other: float32\[2\]"
    ):
        popxl.Session(built(lambda t, other: t + other), "cpu")
    popxl.Session(built(lambda t, other: t + 1), "cpu")
    with pytest.raises(ValueError, match="no value for %t of .*; expected those .* to be the last"):
        built(lambda t, other: t + other, True)


# Labels


PROBABILITIES = torch.softmax(torch.from_numpy(np.random.default_rng(1).normal(size=(2, 3, 5))), -1)
LABELS = np.array([4, 0, 2, 1, 1, 3], np.int32)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(2, 3), (6,), (3, 2), (1, 6, 1)])
def test_labels_have_any_shape_with_one_for_each_row(
    shape: tuple[int, ...], reduction: Any
) -> None:
    probs = PROBABILITIES.clone().requires_grad_()
    loss = torch.nn.functional.nll_loss(
        probs.log().reshape(6, 5), torch.from_numpy(LABELS).long(), reduction=reduction
    )
    (expected,) = torch.autograd.grad(loss.sum(), probs)

    def build(ir: popxl.Ir) -> Sequence[popxl.Tensor]:
        spec = popxl.TensorSpec((2, 3, 5), popxl.float64)
        graph = ir.create_graph(lambda p, labels: ops.nll_loss(p, labels, reduction=reduction), spec,
                                popxl.TensorSpec(shape, popxl.int32))  # fmt: skip
        info = autodiff(graph, grads_required=graph.inputs[:1])
        p, labels = (
            popxl.variable(PROBABILITIES.numpy(), popxl.float64),
            popxl.variable(LABELS.reshape(shape)),
        )
        call = ops.call_with_info(graph, p, labels)
        ones = popxl.constant(np.ones(graph.outputs[0].shape), popxl.float64)
        return [*call.outputs[:1], *ops.call(info.graph, ones, inputs_dict=info.inputs_dict(call)),
                *ops.nll_loss_with_softmax_grad(p, labels, 1, reduction=reduction)]  # fmt: skip

    value, gradient, same, by_logits = run_program(build)
    want = loss.detach().numpy().reshape(shape if reduction == "none" else ())
    np.testing.assert_allclose(value, want, rtol=1e-12)
    np.testing.assert_allclose(same, want, rtol=1e-12)
    np.testing.assert_allclose(gradient, expected.numpy(), rtol=1e-12)
    weight = 1 / 6 if reduction == "mean" else 1.0
    onehot = np.eye(5)[LABELS].reshape(2, 3, 5)
    np.testing.assert_allclose(
        by_logits, (PROBABILITIES.numpy() - onehot) * weight, rtol=1e-12, atol=1e-15
    )


def test_labels_of_any_dtype_are_built_and_refused_by_sessions() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        probs = popxl.variable(PROBABILITIES.numpy(), popxl.float32)
        assert ops.nll_loss(
            probs, popxl.variable(LABELS.astype(np.float32)), reduction="none"
        ).shape == (6,)
    with pytest.raises(DTypeError, match=r"nll_loss: got labels float32\[6\]; expected integers"):
        popxl.Session(ir, "cpu")


# Indices outside


@WAYS
@pytest.mark.parametrize("gather", [ops.gather, ops.tied_gather, ops.groupedgather])
@pytest.mark.parametrize("dtype", [popxl.int32, popxl.int64, popxl.uint32])
def test_indices_outside_read_no_other_memory_and_take_the_nearest_slice(
    gather: Any, dtype: popxl.dtype, interpret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPXL_INTERPRET", interpret)
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    indices = np.array(
        [0, 3, 4, 100, 2**31 - 1] + ([] if dtype is popxl.uint32 else [-1, -5, -(2**31)]), np.int64
    )
    indices = indices.astype(dtype.as_numpy())

    def build(ir: popxl.Ir) -> Sequence[popxl.Tensor]:
        t, whole = popxl.variable(table), popxl.variable(np.arange(4, dtype=np.int32) * 7)
        i = popxl.variable(indices, dtype, downcast=False)
        return [gather(t, i), gather(t, ops.reshape(i, (1, -1)), 1), gather(whole, i)]

    rows, columns, on_host = run_program(build)
    np.testing.assert_array_equal(rows, table.take(indices.astype(np.int64), 0, mode="clip"))
    np.testing.assert_array_equal(
        columns, table.take(indices.astype(np.int64).reshape(1, -1), 1, mode="clip")
    )
    np.testing.assert_array_equal(
        on_host, (np.arange(4) * 7).take(indices.astype(np.int64), mode="clip")
    )


@WAYS
@pytest.mark.parametrize("zero_OOR", [False, True])
@pytest.mark.parametrize("accumulated", [False, True], ids=["gradient", "accumulated"])
def test_gradients_of_indices_outside_go_where_the_values_came_from(
    accumulated: bool, zero_OOR: bool, interpret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPXL_INTERPRET", interpret)
    indices, dy = (
        np.array([1, -2, 7, 1, 3], np.int32),
        np.arange(1, 11, dtype=np.float32).reshape(5, 2),
    )

    def build(ir: popxl.Ir) -> Sequence[popxl.Tensor]:
        table, i = popxl.variable(np.zeros((4, 2), np.float32)), popxl.variable(indices)
        graph = ir.create_graph(lambda t, i: ops.gather(t, i, zero_OOR=zero_OOR), table, i)
        info = autodiff(graph, grads_required=graph.inputs[:1])
        if not accumulated:
            call = ops.call_with_info(graph, table, i)
            return ops.call(info.graph, popxl.constant(dy), inputs_dict=info.inputs_dict(call))
        (made,) = (op for op in info.graph.ops if op.definition.name == "gather_grad")
        sums = popxl.variable(np.zeros((4, 2), np.float32))  # in one graph, where it is one step
        dt = ops.indexing.gather_grad(popxl.constant(dy), i, (4, 2), 0, made.arguments["zero_OOR"])
        accumulate_mean_(sums, dt, popxl.constant(0.0, popxl.float32))
        return [sums]

    expected = np.zeros((4, 2), np.float32)
    for index, row in zip(indices, dy):
        if not zero_OOR or 0 <= index < 4:
            expected[min(max(index, 0), 3)] += row
    (result,) = run_program(build)
    np.testing.assert_array_equal(result, expected)


@WAYS
def test_rows_accumulated_by_indices_outside_change_no_other_memory(
    interpret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPXL_INTERPRET", interpret)

    def build(ir: popxl.Ir) -> Sequence[popxl.Tensor]:
        t = popxl.variable(np.zeros((3, 2), np.float32))
        rows, indices = (
            popxl.variable(np.ones((3, 2), np.float32)),
            popxl.variable([-9, 1, 90], popxl.int32),
        )
        ops.var_updates.sparse_accumulate_(t, rows, indices, f=2.0)
        return [t]

    np.testing.assert_array_equal(run_program(build)[0], np.full((3, 2), 2, np.float32))


# Streams whose axes are all of size one


ONES = [((), (1,)), ((1,), ()), ((1,), (1, 1)), ((), (1, 1)), ((1, 1), (1,)), ((1, 1, 1), ())]


@pytest.mark.parametrize(("stream", "given"), ONES)
@pytest.mark.parametrize(("transfers", "replicas"), [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_arrays_of_axes_of_size_one_fit_streams_of_such_axes(
    stream: tuple[int, ...], given: tuple[int, ...], transfers: int, replicas: int
) -> None:
    ir = popxl.Ir(replication=replicas)
    ir.num_host_transfers = transfers
    with ir.main_graph, popxl.in_sequence():
        x, y = popxl.h2d_stream(stream, popxl.float32), popxl.d2h_stream(stream, popxl.float32)
        for _ in range(transfers):
            ops.host_store(y, ops.host_load(x) * 2.0)
    counts = tuple(n for n in (transfers, replicas) if n > 1)
    with popxl.Session(ir, "cpu") as session:
        for leading in (counts, (transfers, replicas)):
            values = np.arange(transfers * replicas, dtype=np.float32)
            outputs = session.run({x: values.reshape((*leading, *given))})
            assert outputs[y].shape == session._full_input_shape(stream) == (*counts, *stream)
            np.testing.assert_array_equal(outputs[y].reshape(-1), values * 2)
            filled = np.zeros((*leading, *given), np.float32)
            session.run_with_outputs({x: values.reshape((*leading, *given))}, {y: filled})
            np.testing.assert_array_equal(filled.reshape(-1), values * 2)
        with pytest.raises(ValueError, match="got an input array of shape"):
            session.run({x: np.zeros((*counts, 5), np.float32)})


def test_refused_arrays_are_shown_with_the_shape_that_they_had() -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        x = popxl.h2d_stream((1,), popxl.float32)
        ops.host_load(x)
    with popxl.Session(ir, "cpu") as session:
        with pytest.raises(
            ValueError, match=r"got an input array of shape \[1, 3, 1\] .* expected \[2, 1\]"
        ):
            session.run({x: np.zeros((1, 3, 1), np.float32)})


def test_axes_of_size_one_are_not_left_out_of_larger_arrays() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.h2d_stream((1, 4), popxl.float32)
        ops.host_load(x)
    with popxl.Session(ir, "cpu") as session, pytest.raises(ValueError, match=r"expected \[1, 4\]"):
        session.run({x: np.zeros(4, np.float32)})


# Remote variables


def test_the_room_of_slots_and_their_type_are_compared_when_a_session_is_made() -> None:
    type_, room = "a value of the slot's dtype", "at most 2 elements"
    for data, of, expected in (
        (np.ones((3,), np.float32), None, room),
        (np.ones((3, 1), np.float32), None, room),
        (np.ones((2,), np.int32), None, type_),
        ([1.0, 2.0], popxl.float16, type_),
    ):
        ir = popxl.Ir()
        with ir.main_graph:
            buffer = popxl.remote_buffer((2,), popxl.float32, 4)
            v = popxl.remote_variable(data, buffer, 3, of, name="far")
            ops.init((), popxl.float32)
        assert v.dtype is (
            of or popxl.dtype.as_dtype(np.asarray(data).dtype)
        ) and v.shape == np.shape(data)
        with pytest.raises(
            ValueError,
            match=rf"remote variable %far: .* slots of float32\[2\]; expected {expected}",
        ):
            popxl.Session(ir, "cpu")


def test_remote_variables_have_their_datas_type_where_none_is_given() -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        half, shards = (
            popxl.remote_buffer((2,), popxl.float16),
            popxl.replica_sharded_buffer((4,), popxl.int32),
        )
        assert popxl.remote_variable(np.ones(2, np.float32), half).dtype is popxl.float32
        assert popxl.remote_variable(np.ones(2, np.float64), half).dtype is popxl.float32
        assert (
            popxl.remote_replica_sharded_variable(np.ones(4, np.float16), shards).dtype
            is popxl.float16
        )


# Names of types and numbers


def test_float8_on_the_host_has_one_field_of_its_name() -> None:
    for name in ("float8_143", "float8_152"):
        plain = getattr(popxl.dtypes, f"np_dtype_{name}")
        assert plain == np.dtype([(name, np.uint8)]) == getattr(popxl, name).as_numpy()
        assert popxl.dtype.as_dtype(plain) is getattr(popxl, name)
    assert popxl.dtypes.np_dtype_float8_143 != popxl.dtypes.np_dtype_float8_152


def test_a_torch_tensor_stands_for_its_type() -> None:
    for of in (torch.float16, torch.float32, torch.int64, torch.bool, torch.bfloat16):
        assert popxl.dtype.as_dtype(torch.zeros(2, dtype=of)) is popxl.dtype.as_dtype(of)


class Pair(NamedTuple):
    """Two tensors with names."""

    left: popxl.Tensor
    right: popxl.Tensor


def test_named_tuples_of_tensors_become_named_tuples_of_inputs() -> None:
    ir, given = popxl.Ir(), []
    with ir.main_graph:
        x, y = popxl.constant(1.0), popxl.constant([2.0])
        graph = ir.create_graph(lambda pair: given.append(pair), Pair(x, y))
    assert given == [Pair(*graph.inputs)]
    assert [t.shape for t in graph.inputs] == [(), (1,)]


def test_numbers_of_replicas_may_be_numpys() -> None:
    assert type(popxl.Ir(np.int64(2)).replication_factor) is int


def test_the_largest_seed_is_named() -> None:
    assert popxl.random_seed.MAX_UINT64 == 18446744073709551615
    assert popxl.random_seed.uint64_to_two_uint32(popxl.random_seed.MAX_UINT64) == (
        2**32 - 1,
        2**32 - 1,
    )


# Shapes


def test_the_output_shape_of_a_transposed_convolution_is_the_whole_one() -> None:
    t = np.random.default_rng(2).normal(size=(2, 4, 5, 5)).astype(np.float32)
    weight = np.random.default_rng(3).normal(size=(4, 3, 3, 3)).astype(np.float32)

    def build(ir: popxl.Ir) -> Sequence[popxl.Tensor]:
        return [
            ops.conv_transpose(
                popxl.variable(t), popxl.variable(weight), (2, 2), output_shape=(2, 3, 10, 10)
            )
        ]

    (y,) = run_program(build)
    whole = torch.nn.functional.conv_transpose2d(
        torch.from_numpy(t), torch.from_numpy(weight), stride=2
    )
    np.testing.assert_allclose(y, whole[:, :, 1:, 1:].numpy(), rtol=1e-4, atol=1e-5)


def test_slices_of_an_axis_without_bounds_are_the_tensor_itself() -> None:
    with popxl.Ir().main_graph as main:
        t = popxl.variable(np.ones((2, 3), np.float32))
        assert ops.slice(t, axis=1) is t and ops.slice_(t, axis=[0, 1]) is t and ops.slice(t) is t
        assert main.ops == [] or not list(main.ops)
        assert ops.slice(t, stop=1, axis=1).shape == (2, 1)


# Replica groupings without a constant stride


@pytest.mark.parametrize(
    ("assignment", "stride", "size"),
    [
        ([0, 0, 1, 1, 0, 0, 1, 1], 1, 2),
        ([0, 1, 0, 1, 1, 0, 1, 0], 1, 1),  # pairs two apart would do, but 3 and 4 are neighbours
        ([0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1], 1, 2),
        ([0, 1, 0, 1, 2, 3, 2, 3, 0, 1, 0, 1, 2, 3, 2, 3], 2, 2),
        ([0, 1, 1, 0], 1, 1),
    ],
)
def test_the_constant_refinement_has_the_smallest_stride_and_the_pieces_divisor(
    assignment: list[int], stride: int, size: int
) -> None:
    ir = popxl.Ir(replication=len(assignment))
    grouping = ir.replica_grouping_from_assignments(assignment)
    assert not grouping.is_const
    assert grouping.const_rg == ir.replica_grouping(stride=stride, group_size=size)
    owners = grouping.to_device_map
    assert owners is not None
    for owner, members in zip(owners, grouping.const_rg.groups):
        assert {assignment[member] for member in members} == {owner}
