"""Virtual devices: 0 outside `popxl.ipu`, and operands on one device only."""

from typing import Any

import numpy as np
import popxl
import popxl_addons as addons
import pytest
from popxl import ops
from popxl.errors import UndefinedValue
from popxl.placement import NO_IPU

ONES = np.ones((3, 3), np.float32)


@pytest.fixture
def v() -> Any:
    """A variable in the main graph, which is current."""
    with popxl.Ir().main_graph:
        yield popxl.variable(ONES)


def test_what_is_made_outside_any_context_is_on_device_0(v: Any) -> None:
    stream = popxl.h2d_stream((3, 3), popxl.float32)
    (called,) = ops.call(popxl.gcg().ir.create_graph(lambda x: x * 2, v), v)
    for t in (v + 1, v @ v, ops.host_load(stream), ops.init((2,), popxl.float32), called):
        assert t.ipu == 0
    with popxl.ipu(2):
        assert (v + 1).ipu == 2
    assert (v + 1).ipu == 0


@pytest.mark.parametrize(
    "join",
    [
        ops.add,
        ops.matmul,
        ops.add_,
        ops.scaled_add_,
        lambda a, b: ops.concat([a, b]),
        lambda a, b: a * b,
        ops.greater,
        ops.var_updates.accumulate_,
    ],
)
def test_operands_on_device_0_by_default_and_on_device_1_are_refused(v: Any, join: Any) -> None:
    here = v * 2
    with popxl.ipu(1):
        there = v * 3
        with pytest.raises(
            ValueError,
            match="virtual device 0, .*virtual device 1; .*Move operands with ops.ipu_copy",
        ):
            join(here, there)
        join(here.copy_to_ipu(1), there)
    join(here, there.copy_to_ipu(0))
    with pytest.raises(ValueError, match="virtual device 0, .*virtual device 1"):
        join(here, there)


def test_variables_constants_and_inputs_go_where_they_are_used(v: Any) -> None:
    with pytest.raises(UndefinedValue, match="no op made and none uses"):
        _ = v.ipu
    here = v * 2
    with popxl.ipu(1):
        there = popxl.variable(ONES)
        result = there + popxl.constant(ONES)
        _ = v * result  # PopXL programs use variables on several devices
    assert (v.ipu, there.ipu, result.ipu, here.ipu) == (0, 1, 1, 0)
    moved = popxl.variable(ONES)
    ops.ipu_copy(moved, 2, 1)
    assert moved.ipu == 1


def test_ops_in_a_block_without_a_device_have_none(v: Any) -> None:
    ir = popxl.gcg().ir
    assert popxl.gir() is ir
    with popxl.ipu(1), popxl.ipu(None) as device:
        assert device is None and popxl.context.get_current_context().ipu_id is None
        x = v * 2
        graph = ir.create_graph(lambda t: ops.tanh(t), v)
        w = popxl.variable(ONES)
        y = w + x
    (called,) = ops.call(graph, v)
    for t in (x, y, called, w):
        with pytest.raises(UndefinedValue, match=f"got %{t.name}, "):
            _ = t.ipu
        for copy in (lambda t=t: ops.ipu_copy(t, 1), lambda t=t: t.copy_to_ipu(1, None)):
            with pytest.raises(ValueError, match=f"got %{t.name}, whose device is not known; .*="):
                copy()
    moved = ops.ipu_copy(x, 2, 0)
    assert moved.ipu == 2 and (v + 1).ipu == 0
    with popxl.ipu(1):
        assert (x + ops.ipu_copy(x, 1, 0)).ipu == 1  # what has no device is with any
        assert ops.call(graph, v)[0].ipu == 1
        assert (w * 2).ipu == w.ipu == 1  # the first use that has one
    with popxl.ipu(1):
        info = popxl.transforms.autodiff(graph)
    assert {op.ipu for op in graph.ops} == {op.ipu for op in info.graph.ops} == {NO_IPU}
    plain = ir.create_graph(lambda t: ops.tanh(t), v)
    with popxl.ipu(None):  # where it is called does not matter
        info = popxl.transforms.autodiff(plain)
    assert {t.ipu for op in info.graph.ops for t in op.outputs} == {0}


def test_a_program_without_devices_has_the_numbers_of_one_with_them() -> None:
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence(), popxl.ipu(None):
        w, out = popxl.variable(ONES), popxl.d2h_stream((3, 3), popxl.float32)
        w += 1
        ops.host_store(out, ops.call(ir.create_graph(lambda t: t @ t, w), w)[0])
    with popxl.Session(ir) as session:
        np.testing.assert_array_equal(session.run()[out], (ONES + 1) @ (ONES + 1))


def test_calls_take_arguments_from_every_device_and_run_where_their_graph_was_built(v: Any) -> None:
    ir = popxl.gcg().ir
    with popxl.ipu(1):
        graph = ir.create_graph(lambda x, y: x * y, v, v)
        there = v * 3
    (result,) = ops.call(graph, v * 2, there)
    assert result.ipu == 1
    with pytest.raises(ValueError, match="virtual device"):
        result + v * 2


def test_gradients_of_a_program_on_two_devices_are_on_the_devices_of_its_ops(v: Any) -> None:
    def two_devices(x: popxl.Tensor) -> popxl.Tensor:
        y = ops.tanh(x)
        with popxl.ipu(1):
            return ops.tanh(y.copy_to_ipu(1)) * 2

    graph = popxl.gcg().ir.create_graph(two_devices, v)
    with popxl.ipu(1):  # where autodiff is called does not matter
        info = popxl.transforms.autodiff(graph)
    assert [t.ipu for t in (info.graph.outputs[0], graph.outputs[0])] == [0, 1]
    copies = [op for op in info.graph.ops if op.definition.name == "ipu_copy"]
    assert [(op.arguments["source"], op.arguments["destination"]) for op in copies] == [(1, 0)]
    before, after = (
        info.graph.ops[: info.graph.ops.index(copies[0])],
        info.graph.ops[info.graph.ops.index(copies[0]) :],
    )
    assert {op.outputs[0].ipu for op in before} == {1} and {op.outputs[0].ipu for op in after} == {
        0
    }


def test_a_pipeline_copies_between_the_default_device_and_others() -> None:
    ir = popxl.Ir()
    ir.num_host_transfers = 4
    with ir.main_graph, popxl.in_sequence():
        w = popxl.variable(ONES)
        into, out = popxl.h2d_stream((3, 3), popxl.float32), popxl.d2h_stream((3, 3), popxl.float32)
        with addons.pipelined_execution(4) as pipeline:
            with pipeline.stage(0):
                x = ops.host_load(into) + 1
            with pipeline.stage(1), popxl.ipu(1):
                y = pipeline.stash_and_restore_tensor(x)
                assert (x.ipu, y.ipu) == (0, 1)
                ops.host_store(out, y @ w)
    data = np.arange(36, dtype=np.float32).reshape(4, 3, 3)
    with popxl.Session(ir) as session:
        np.testing.assert_array_equal(session.run({into: data})[out], (data + 1) @ ONES)
