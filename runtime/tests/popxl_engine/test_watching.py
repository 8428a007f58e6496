"""`extensions.find_not_finite`: which tensor first stopped being finite, in which phase and round,
on which replica.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import popxl
import pytest
from popxl import extensions, ops
from popxl.ops import collectives, var_updates

SPEC = popxl.TensorSpec((3,), popxl.float32)
HUGE = np.array([1.0, 2.0, 3e38], np.float32)


def found_in(
    build: Callable[[popxl.Ir], Sequence[popxl.Tensor]], replicas: int = 1
) -> list[extensions.NotFinite]:
    """What is found in a program's run, which gives the same numbers as one that is not watched."""
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph, popxl.in_sequence(True):
        streams = []
        for t in build(ir):
            streams.append(popxl.d2h_stream(t.shape, t.dtype))
            ops.host_store(streams[-1], t)
    with popxl.Session(ir) as session:
        state = session.get_tensors_data(ir.main_graph.variables)
        plain = session.run({})
        session.write_variables_data(state)
        with extensions.find_not_finite(session) as found:
            watched = session.run({})
        session.write_variables_data(state)
        again = session.run({})
    for stream in streams:
        np.testing.assert_array_equal(watched[stream], plain[stream])
        np.testing.assert_array_equal(again[stream], plain[stream])
    return found


def grow(n: popxl.Tensor, x: popxl.Tensor) -> Any:
    return n + 1, ops.mul(x, popxl.constant(np.float32(10.0)))


def phase(n: popxl.Tensor, x: popxl.Tensor) -> Any:
    graph = popxl.gir().create_graph(grow, n, x.spec)
    zero = popxl.constant(0, popxl.int32)
    return n + 1, ops.repeat(graph, 4, zero, x)[1]


def test_the_round_of_every_loop_around_the_op_is_told():
    def build(ir):
        n, x = (
            popxl.constant(0, popxl.int32),
            popxl.variable(np.array([1.0, 1e-3, 3e32], np.float32)),
        )
        graph = ir.create_graph(phase, n, x)
        return ops.repeat(graph, 3, n, x)

    (found,) = found_in(build)
    assert (found.replica, found.value, found.op) == (0, "inf", "mul")
    # 3e32 * 10 ** 7 is too much
    assert found.phase == "phase" and dict(found.loops) == {"phase": 1, "grow": 2}
    assert found.where.rsplit(":", 1)[0].endswith("test_watching.py")


def by_factor(n: popxl.Tensor, x: popxl.Tensor, factor: float) -> Any:
    return n + 1, ops.mul(x, popxl.constant(np.float32(factor)))


@pytest.mark.parametrize("power, run", [(37, 1), (36, 2), (35, 4), (34, 6), (33, 7)])
def test_how_often_a_run_had_gone_through_phases_of_one_name_is_told(power, run):
    def build(ir):
        n, x = popxl.constant(0, popxl.int32), popxl.variable(np.float32(10.0**power))
        ten, one = (ir.create_graph(by_factor, n, x.spec, factor) for factor in (10.0, 1.0))
        for graph, times in ((ten, 3), (one, 1), (ten, 1), (one, 1), (ten, 2)):
            n, x = ops.repeat(graph, times, n, x)
        return [x]

    (found,) = found_in(build)
    assert (found.phase, found.phase_runs) == ("by_factor", run)


def test_finite_numbers_and_masks_are_left_alone():
    def build(ir):
        x = popxl.variable(np.array([1.0, 2.0, 3.0], np.float32))
        mask = popxl.constant(np.array([0.0, -np.inf, 0.0], np.float32))
        return [
            ops.softmax(x + mask, axis=-1),
            ops.where(
                ops.greater(x, popxl.constant(np.float32(2.0))),
                popxl.constant(np.float32(np.inf)),
                x,
            ),
        ]

    assert found_in(build) == []


@pytest.mark.parametrize("value, told", [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")])
def test_a_row_that_is_loaded_so_is_told(value, told):
    def build(ir):
        data = np.array([[1.0, 2.0], [1.0, value]], np.float32)
        buffer = popxl.remote_buffer((2,), popxl.float32, 2)
        for row in (0, 1):
            popxl.remote_variable(data[row], buffer, row, name=f"row_{row}")
        return [ops.remote_load(buffer, 0) + ops.remote_load(buffer, 1)]

    (found,) = found_in(build)
    assert found.value == told and found.op.startswith("remote_load")


def test_an_op_that_writes_is_told_only_if_what_it_wrote_to_was_finite():
    def build(ir):
        x, y = popxl.variable(HUGE), popxl.variable(HUGE)
        var_updates.accumulate_(x, y)
        ops.add_(x, y)
        return [x]

    (found,) = found_in(build)
    assert (found.op, found.value) == ("accumulate_", "inf")


def test_the_replica_that_was_first_comes_first():
    def build(ir):
        x = popxl.variable(
            np.stack([HUGE / 1e3, HUGE]), replica_grouping=ir.replica_grouping(group_size=1)
        )
        return [collectives.replicated_all_reduce(x * 2.0)]

    first, second = found_in(build, replicas=2)
    assert (first.replica, first.op, first.value) == (1, "mul", "inf")
    assert (second.replica, second.op) == (
        0,
        "replicated_all_reduce",
    ) and first.order < second.order


def test_an_interpreted_session_is_not_watched(monkeypatch):
    monkeypatch.setenv("POPXL_INTERPRET", "1")
    ir = popxl.Ir()
    with ir.main_graph:
        popxl.variable(1.0) + 1.0
    with popxl.Session(ir) as session, pytest.raises(RuntimeError, match="Unset POPXL_INTERPRET"):
        extensions.find_not_finite(session).__enter__()
