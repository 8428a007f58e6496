"""Rows of a table's gradient that go straight into another gradient: the interpreter's numbers, and
when they may.
"""

from collections.abc import Callable, Sequence

import numpy as np
import popxl
import pytest
from helpers.fused_programs import fused_steps, normal, observe
from helpers.tolerance import assert_close
from popxl import TensorByRef as Ref
from popxl import ops
from popxl.ops import var_updates
from popxl.tensor import Tensor
from popxl_addons.remote import create_remote_buffer

SHAPE = (6, 4)
INSIDE, OUTSIDE = [1, 5, 1, 0, 2], [1, 5, 1, -1, 6]


def two_gradients(
    twist: str = "", dtype: popxl.dtype = popxl.float32, times: int = 1
) -> Callable[[popxl.Ir], Sequence[Tensor]]:
    """A table's gradient by looked-up rows, a mean over runs of a loop, added to another; with a
    twist.
    """

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        other = popxl.variable(normal(*SHAPE), dtype, name="other")
        dy = popxl.variable(normal(5, 4), dtype, name="dy")
        ids = popxl.variable(
            np.array(OUTSIDE if "outside" in twist else INSIDE, np.int32), name="ids"
        )

        def body(sums: Ref, count: Ref, dy: Ref, ids: Ref) -> list[Tensor]:
            if twist == "counted before":
                ops.add_(count, popxl.constant(1.0))
            rows = ops.indexing.gather_grad(dy, ids, SHAPE, 0, twist != "outside, to the nearest")
            var_updates.accumulate_mean_(sums, rows, count)
            if twist == "twice":
                var_updates.accumulate_mean_(sums, rows, count)
            ops.add_(count, popxl.constant(1.0))
            return []

        sums = ops.init(SHAPE, dtype, "sums")
        count = ops.init((), popxl.float32, "count")
        graph = ir.create_graph(body, sums, count, dy, ids)
        if twist == "counter is not zero":
            ops.add_(count, popxl.constant(2.0))
        if twist == "sums are not zero":
            ops.add_(sums, popxl.constant(2.0, dtype))
        ops.repeat(graph, times, sums, count, dy, ids)
        more = {"sums are read": lambda: [sums * 2.0], "sums are an output": lambda: [sums]}.get(
            twist, list
        )()
        if twist == "rows are written":
            ops.add_(dy, popxl.constant(1.0, dtype))
        if twist == "indices are written":
            ops.add_(ids, popxl.constant(1, popxl.int32))
        if twist == "sums are written":
            ops.add_(sums, popxl.constant(1.0, dtype))
        ops.add_(
            sums if twist == "the other way" else other, other if twist == "the other way" else sums
        )
        return [other, sums if twist == "the other way" else other, *more]

    return build


def added(build: Callable[[popxl.Ir], Sequence[Tensor]]) -> bool:
    """Whether a program adds rows at once; its numbers are the interpreter's."""
    expected, _ = observe(build, True, runs=2)
    found, engine = observe(build, False, runs=2)
    for name, (value, dtype) in expected.items():
        assert_close(found[name][0], value, dtype, name)
    return "scatter_add_rows" in fused_steps(engine)


@pytest.mark.parametrize("twist", ["", "outside", "outside, to the nearest"])
def test_rows_are_added_at_once(twist: str) -> None:
    assert added(two_gradients(twist))


@pytest.mark.parametrize(
    "twist",
    [
        "counted before",
        "counter is not zero",
        "sums are not zero",
        "twice",
        "sums are read",
        "sums are an output",
        "sums are written",
        "rows are written",
        "indices are written",
        "the other way",
    ],
)
def test_sums_that_others_meet_and_what_changes_stay(twist: str) -> None:
    assert not added(two_gradients(twist))


def test_a_mean_over_several_runs_and_narrow_gradients_stay() -> None:
    assert not added(two_gradients(times=2))
    assert not added(two_gradients(dtype=popxl.bfloat16))


def test_rows_that_lie_where_they_are_added_are_read_first() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        table = popxl.variable(normal(*SHAPE), name="table")
        ids = popxl.variable(np.array([1, 5, 1, 0, 2, 2], np.int32))
        sums, count = ops.init(SHAPE, popxl.float32, "sums"), ops.init((), popxl.float32, "count")
        var_updates.accumulate_mean_(
            sums, ops.indexing.gather_grad(table, ids, SHAPE, 0, True), count
        )
        ops.add_(table, sums)
        return [table]

    assert not added(build)


@pytest.mark.parametrize("step", [0, 0.0, 2.0])
def test_a_mean_that_is_counted_by_a_number_stays(step: float) -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        other, dy = (
            popxl.variable(normal(*SHAPE), name="other"),
            popxl.variable(normal(5, 4), name="dy"),
        )
        ids = popxl.variable(np.array(INSIDE, np.int32))
        sums = ops.init(SHAPE, popxl.float32, "sums")
        var_updates.accumulate_mean_(sums, ops.indexing.gather_grad(dy, ids, SHAPE, 0, True), step)
        ops.add_(other, sums)
        return [other]

    assert not added(build)


@pytest.mark.parametrize("row", [0, 1])
def test_rows_and_their_target_may_come_from_one_remote_buffer(row: int) -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        ids = popxl.variable(np.array([1, 5, 1, 0, 2, 2], np.int32))
        buffer = create_remote_buffer(popxl.tensor.TensorSpec(SHAPE, popxl.float32), 2)
        for i in range(2):
            ops.remote_store(buffer, i, popxl.variable(normal(*SHAPE, seed=i), name=f"v{i}"))
        dy = ops.remote_load(buffer, 0)
        sums, count = ops.init(SHAPE, popxl.float32, "sums"), ops.init((), popxl.float32, "count")
        var_updates.accumulate_mean_(sums, ops.indexing.gather_grad(dy, ids, SHAPE, 0, True), count)
        target = ops.remote_load(buffer, row)
        ops.add_(target, sums)
        ops.remote_store(buffer, row, target)
        return [ops.remote_load(buffer, 0), ops.remote_load(buffer, 1)]

    assert added(build)


def test_the_rule_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPXL_PASSES", "-fuse_embedding_grad")
    assert not added(two_gradients())
