"""Laps: the time of a run goes to the label that its replica began last."""

import time

import numpy as np
import popxl
import pytest
from popxl import extensions, ops
from popxl_engine.machine.laps import Laps


class Counted:
    """A clock that counts how often it was asked."""

    def __init__(self):
        self.asked = self.cleared = 0

    def now(self):
        self.asked += 1
        return self.asked

    def times(self, moments):
        self.cleared += 1
        return [10**9 * moment for moment in moments]


def test_replicas_that_take_turns_have_laps_of_their_own():
    waited = iter([1.0, 1.5])
    laps = Laps(Counted(), lambda: next(waited))
    with laps.run():
        laps.resume(0)
        laps.begin(0, "first")  # at 2
        laps.begin(0, "first")
        laps.resume(1)  # at 3: in none
        laps.begin(1, "second")  # at 4
        laps.resume(0)  # at 5: the first one's again
        laps.begin(0, "second")  # at 6
        laps.resume(1)  # the same
    assert laps.seconds() == laps.seconds() == {"first": 2.0, "second": 2.0}
    assert (laps.waited_for_rows, laps.waited_for_others) == (0.5, 0.0)


def test_moments_of_runs_that_nobody_asks_about_are_given_up():
    clock = Counted()
    laps = Laps(clock, lambda: 0.0)
    for _ in range(3):
        with laps.run():
            laps.begin(0, "only")
    assert clock.cleared == 2 and laps.seconds() == {"only": 1.0} and clock.cleared == 3


def turn(x: popxl.Tensor) -> popxl.Tensor:
    extensions.begin_lap("square")
    x = x @ x
    extensions.begin_lap("sum")
    return ops.collectives.replicated_all_reduce(x) * 1e-3


@pytest.mark.parametrize("interprets", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_laps_in_loops_take_nearly_all_the_time_of_a_run(interprets, replicas, monkeypatch):
    if interprets:
        monkeypatch.setenv("POPXL_INTERPRET", "1")
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph:
        x = popxl.variable(np.ones((300, 300), np.float32))
        graph = ir.create_graph(turn, x)
        (y,) = ops.repeat(graph, 10, x)
        out = popxl.d2h_stream(y.shape, y.dtype)
        ops.host_store(out, y)
    with popxl.Session(ir, "cpu") as session:
        for _ in range(2):
            begin = time.perf_counter()
            session.run()
            seconds = time.perf_counter() - begin
            found = extensions.run_times(session)
            assert found.laps.keys() == {"square", "sum"}
            assert 0 < sum(found.laps.values()) < seconds
            assert all(lap > 0 for lap in found.laps.values())
            assert found.waited_for_rows == found.waited_for_others == 0.0
