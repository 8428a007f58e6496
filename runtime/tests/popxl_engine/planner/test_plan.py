"""Plans of small programs: work, traffic and memory against sums done by hand, and against the
counters of a run.
"""

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import popxl
import pytest
from helpers.op_cases import build, make_case
from helpers.op_samples import SAMPLES
from helpers.plan_programs import (
    REPLICAS,
    ROWS,
    K,
    M,
    N,
    first_and_later_steps,
    program,
)
from popxl import ops
from popxl.errors import GraphError
from popxl.extensions import compiled_once, host_needs, split_into_phases
from popxl.op_records import OPS
from popxl.ops import collectives
from popxl.plan import Event, Machine, PhaseTime, TimelineStep, phase_time
from popxl.planning import measure, plan, sequence
from popxl_engine import compiler
from popxl_engine.machine.replica import Replica
from popxl_engine.planner import dry_run, live_bytes


def run(ir: popxl.Ir) -> popxl.Session:
    """The session of a program that has run once."""
    session = popxl.Session(ir)
    inputs = {
        s: np.ones(session._full_input_shape(s.shape), np.float32)
        for s in session.expected_inputs()
    }
    with session:
        session.run(inputs)
    return session


def test_work_and_traffic_are_those_of_the_graphs():
    found = plan(program())
    rows, final = (
        next(p for p in found.phases if p.name == name) for name in ("row_phase", "final_phase")
    )
    assert [p.name for p in found.phases] == ["main", "row_phase", "final_phase"]
    assert (rows.runs, final.runs) == (ROWS, 1)
    assert rows.product_flops == ROWS * 2 * M * K * N
    assert (
        (rows.loads, rows.loaded_bytes)
        == (rows.stores, rows.stored_bytes)
        == (ROWS, ROWS * 4 * K * N)
    )
    (pairs,) = rows.collectives
    assert (pairs.op, pairs.group_size, pairs.stride, pairs.calls) == (
        "replicated_all_reduce",
        2,
        2,
        ROWS,
    )
    assert pairs.brought_bytes == ROWS * 4 * M * N
    assert pairs.sent_bytes == ROWS * 4 * M * N  # 2 (n - 1) / n with n = 2
    gather, scatter = final.collectives
    length = -(-M * N // REPLICAS)
    assert (gather.brought_bytes, scatter.brought_bytes) == (4 * length, 4 * M * N)
    assert gather.sent_bytes == scatter.sent_bytes == 3 * 4 * length
    assert found.phases[0].host_bytes == 4 * M * K + 4
    assert (found.replicas, found.steps, found.total_remote_memory_bytes) == (
        REPLICAS,
        1,
        4 * found.remote_memory_bytes,
    )


def test_groups_without_a_constant_stride_are_told_by_a_stride_of_zero():
    ir = popxl.Ir(REPLICAS)
    with ir.main_graph:
        x = ops.host_load(popxl.h2d_stream((N,), popxl.float32, "x"))
        mirrored = ir.replica_grouping_from_assignments([0, 1, 1, 0])
        ops.host_store(
            popxl.d2h_stream((N,), popxl.float32),
            collectives.replicated_all_reduce(x, group=mirrored),
        )
    (found,) = plan(ir).phases[0].collectives
    assert (found.group_size, found.stride, found.calls, found.brought_bytes) == (2, 0, 1, 4 * N)


@pytest.mark.parametrize("interpret", ["0", "1"], ids=["engine", "interpreter"])
def test_traffic_equals_the_counters_of_a_run(interpret: str, monkeypatch: Any):
    monkeypatch.setenv("POPXL_INTERPRET", interpret)
    found = plan(program())
    calls: dict = {}
    for phase in found.phases:
        for c in phase.collectives:
            calls[c.op, c.group_size] = (c.calls, c.brought_bytes)
    for replica in run(program())._engine.machine.replicas:
        traffic = replica.traffic
        assert traffic.loaded_bytes == sum(p.loaded_bytes for p in found.phases)
        assert traffic.stored_bytes == sum(p.stored_bytes for p in found.phases)
        assert (traffic.loads, traffic.stores) == (ROWS, ROWS)
        assert {
            (op, len(members)): counts for (op, members), counts in traffic.collectives.items()
        } == calls


def test_the_sequence_is_the_order_of_a_run(monkeypatch: Any):
    seen: list[Any] = []
    for name in ("load", "store"):
        original = getattr(Replica, f"remote_{name}")

        def noted(
            self: Replica, buffer: Any, row: int, *rest: Any, kind: str = name, fn: Any = original
        ) -> Any:
            if self.index == 2:
                seen.append((kind, row))
            return fn(self, buffer, row, *rest)

        monkeypatch.setattr(Replica, f"remote_{name}", noted)
    run(program())
    events = list(sequence(program(), replica=2))
    assert [(e.kind, e.row) for e in events if e.kind != "collective"] == seen
    assert [e.phase for e in events] == ["row_phase"] * 3 * ROWS + ["final_phase"] * 2
    assert events[-1] == Event("final_phase", "collective", "replicated_all_gather")


def test_a_main_graph_that_only_repeats_one_graph_is_planned_as_that_graph():
    import popxl_addons as addons

    ir = program(steps=6)
    addons.repeat_graph(ir.main_graph, 6)
    once, repeated = plan(program()), plan(ir)
    assert (once.steps, repeated.steps) == (1, 6)
    assert [(p.name, p.runs, p.flops, p.loads) for p in repeated.phases] == [
        (p.name, 6 * p.runs, 6 * p.flops, 6 * p.loads) for p in once.phases
    ]
    calls = [
        [(c.calls, c.brought_bytes) for p in found.phases for c in p.collectives]
        for found in (once, repeated)
    ]
    assert calls[1] == [(6 * calls, 6 * brought) for calls, brought in calls[0]]
    assert len(list(sequence(ir))) == 6 * len(list(sequence(program())))


def own_name(phase: str) -> str:
    """What the function is called where it is defined."""
    return phase.rpartition(".")[2]


@pytest.mark.parametrize("steps", [2, 4])
def test_phases_of_a_loop_of_steps_are_those_of_the_run(steps: int):
    found = plan(first_and_later_steps(steps))
    assert found.steps == steps
    assert {p.name.rpartition(".")[0] for p in found.phases} == {"", "first_and_later_steps"}
    assert [(own_name(p.name), p.runs) for p in found.phases if p.name != "main"] == [
        ("forward_phase", 2),
        ("middle_phase", steps),
        ("report_phase", steps),
        ("forward_and_store_phase", 2 * (steps - 1)),
        ("last_phase", 1),
    ]
    amounts = {
        own_name(p.name): (p.product_flops, p.loads, p.stores, p.host_bytes) for p in found.phases
    }
    product, later = 2 * K**3, steps - 1
    assert amounts["forward_phase"] == (2 * product, 2, 0, 0)
    assert amounts["forward_and_store_phase"] == (2 * later * product, 2 * later, 2 * later, 0)
    assert amounts["report_phase"] == (0, 0, 0, steps * 4 * K * K)
    names = ["forward_phase"] * 2 + ["forward_and_store_phase"] * 4 * later
    events = sequence(first_and_later_steps(steps))
    assert [own_name(e.phase) for e in events if e.kind != "collective"] == names
    peaks = {own_name(p.name): p.peak_bytes for p in found.phases}
    assert all(
        peaks[name] >= 4 * K * K
        for name in ("forward_phase", "forward_and_store_phase", "middle_phase")
    )


def test_phases_are_found_in_a_loop_of_steps_of_the_same_name():
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence(True):
        x = ops.host_load(popxl.h2d_stream((K, K), popxl.float32))
        product = ir.create_graph(lambda x: ops.matmul(x, x), x)
        halved = ir.create_graph(lambda x: x * 0.5, x)

        def step(x: popxl.Tensor) -> Any:
            return ops.call(halved, *ops.call(product, x))

        (x,) = step(x)
        (x,) = ops.repeat(ir.create_graph(lambda x: step(x), x), 3, x)
        ops.host_store(popxl.d2h_stream((K, K), popxl.float32), x)
    found = plan(ir)
    assert found.steps == 4
    amounts = {own_name(p.name): (p.runs, p.product_flops) for p in found.phases}
    assert amounts == {"main": (4, 0), "<lambda>": (8, 8 * K**3)}


@pytest.mark.parametrize("later_steps", [0, 3])
def test_phases_of_a_part_of_a_step_are_what_it_calls(later_steps: int):
    ir = popxl.Ir()

    def product_phase(x: popxl.Tensor) -> popxl.Tensor:
        return ops.matmul(x, x)

    def halved_phase(x: popxl.Tensor) -> popxl.Tensor:
        return x * 0.5

    with ir.main_graph, popxl.in_sequence(True):
        x = ops.host_load(popxl.h2d_stream((K, K), popxl.float32))
        product, halved = ir.create_graph(product_phase, x), ir.create_graph(halved_phase, x)
        part = ir.create_graph(lambda x: ops.call(halved, *ops.repeat(product, 2, x)), x)
        split_into_phases(part)

        def step(x: popxl.Tensor) -> Any:
            return ops.call(halved, *ops.repeat(part, 3, x))

        (x,) = step(x)
        if later_steps:
            (x,) = ops.repeat(ir.create_graph(lambda x: step(x), x), later_steps, x)
        ops.host_store(popxl.d2h_stream((K, K), popxl.float32), x)
    found, steps = plan(ir), 1 + later_steps
    assert found.steps == steps
    amounts = {own_name(p.name): (p.runs, p.product_flops) for p in found.phases}
    assert amounts["product_phase"] == (6 * steps, 6 * steps * 2 * K**3)
    assert amounts["halved_phase"] == (4 * steps, 0)
    assert amounts.keys() == {"main", "product_phase", "halved_phase"}


def test_a_phase_that_calls_another_one_is_no_loop_of_steps():
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence(True):
        x = ops.host_load(popxl.h2d_stream((K, K), popxl.float32))
        shared = ir.create_graph(lambda x: x + 1.0, x)

        def outer_phase(x: popxl.Tensor) -> popxl.Tensor:
            (x,) = ops.call(shared, x)
            return x * 2.0

        (x,) = ops.call(shared, x)
        (x,) = ops.repeat(ir.create_graph(outer_phase, x), 5, x)
        ops.host_store(popxl.d2h_stream((K, K), popxl.float32), x)
    found = plan(ir)
    assert found.steps == 1 and {own_name(p.name): p.runs for p in found.phases}["outer_phase"] == 5


def chain(x: popxl.Tensor) -> popxl.Tensor:
    """Two operands and a result live at a time: x is used again at the end."""
    return ops.sum(ops.exp(ops.exp(x)) + x)


@pytest.mark.parametrize("elements", [13, 1001])
def test_peak_memory_is_what_is_alive_at_a_time(elements: int):
    ir = popxl.Ir()
    with ir.main_graph:
        x = ops.host_load(popxl.h2d_stream((elements,), popxl.float32))
        (y,) = ops.call(ir.create_graph(chain, x), x)
        ops.host_store(popxl.d2h_stream((), popxl.float32), y)
    assert plan(ir).peak_bytes == 3 * 4 * elements
    assert plan(ir, borrows_rows=True).peak_bytes == 2 * 4 * elements, (
        "the stream's slot is the host's memory"
    )


def test_of_a_branch_that_the_device_decides_the_dearer_side_is_planned():
    ir = popxl.Ir()
    with ir.main_graph:
        x = ops.host_load(popxl.h2d_stream((M, M), popxl.float32))
        condition = ops.greater(ops.sum(x), popxl.constant(0.0))
        cheap, dear = ir.create_graph(lambda t: t + t, x), ir.create_graph(lambda t: t @ t, x)
        (y,) = ops.conditional(condition, cheap, dear, [x], [x])
        ops.host_store(popxl.d2h_stream((M, M), popxl.float32), y)
    found = plan(ir)
    assert sum(p.product_flops for p in found.phases) == 2 * M**3


@pytest.mark.slow
def test_what_a_program_needs_of_the_host_takes_one_compilation(monkeypatch: Any):
    lowered, lower = [], compiler.lower

    def noted(*arguments: Any) -> Any:
        lowered.append(arguments)
        return lower(*arguments)

    monkeypatch.setattr(compiler, "lower", noted)
    assert host_needs(program()).tensors > 0
    assert len(lowered) == 1


@pytest.mark.slow
def test_a_plan_and_what_it_needs_of_the_host_are_compiled_once_where_that_is_asked(
    monkeypatch: Any,
):
    lowered, lower = [], compiler.lower

    def noted(*arguments: Any) -> Any:
        lowered.append(arguments)
        return lower(*arguments)

    ir = program()
    expected = plan(ir), plan(ir, borrows_rows=True), host_needs(ir)
    monkeypatch.setattr(compiler, "lower", noted)
    with compiled_once(ir):
        with compiled_once(ir):
            assert (plan(ir), plan(ir, borrows_rows=True), host_needs(ir)) == expected
        assert len(lowered) == 3  # as its author wrote it, as it runs here, and in processes
        assert host_needs(program()).tensors == expected[2].tensors  # of another program
        assert len(lowered) == 4
    assert host_needs(ir) == expected[2] and len(lowered) == 5


def outer_phase(t: popxl.Tensor) -> popxl.Tensor:
    """Tensors that are large beside the rows, and no row."""
    return ops.sum(ops.matmul(t.reshape((-1, 1)), t.reshape((1, -1))))


def test_rows_are_there_while_a_phase_runs_that_takes_none():
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence(True):
        buffer = popxl.remote_buffer((64, 64), popxl.float32, 1)
        popxl.remote_variable(np.ones((64, 64), np.float32), buffer, 0)
        row = ops.remote_load(buffer, 0)
        ops.remote_store(buffer, 0, row + 1.0)
        t = ops.host_load(popxl.h2d_stream((512,), popxl.float32))
        (total,) = ops.call(ir.create_graph(outer_phase, t), t)
        ops.host_store(popxl.d2h_stream((), popxl.float32), total)
    found = host_needs(ir)
    assert found.tensors >= 4 * 512**2 and found.rows == found.all_rows == 4 * 64**2


def test_a_plan_without_torchs_compiler_is_the_same_and_leaves_torch_as_it_was(monkeypatch: Any):
    ir, functions = program(), live_bytes._left_alone()
    before = [getattr(function, live_bytes.LEFT_ALONE, None) for function in functions]
    found = plan(ir)
    assert functions
    assert before == [getattr(function, live_bytes.LEFT_ALONE, None) for function in functions]
    monkeypatch.setattr(dry_run, "without_compiler", nullcontext)
    assert plan(ir) == found


@pytest.mark.slow
def test_every_op_can_be_planned():
    for name in sorted({sample.op for sample in SAMPLES}):
        sample = next(s for s in SAMPLES if s.op == name)
        made = build(make_case(sample))
        ir = made.graph.ir
        with ir.main_graph:
            inputs = [ops.host_load(popxl.h2d_stream(t.shape, t.dtype)) for t in made.graph.inputs]
            for t in ops.call(made.graph, *inputs):
                ops.host_store(popxl.d2h_stream(t.shape, t.dtype), t)
        assert plan(ir).phases, name


HUGE = """
import resource
import numpy as np
import popxl
import popxl.planning
from popxl import ops
import torch
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
ir = popxl.Ir(256)
size = 1 << 20
with ir.main_graph:
    buffer = popxl.remote_buffer((size, size), popxl.float32, 256)
    zeros = np.broadcast_to(np.float32(0), (size, size))
    for row in range(256):
        popxl.remote_variable(zeros, buffer, row)
    w = ops.remote_load(buffer, 0)
    ops.remote_store(buffer, 1, w @ w)
found = popxl.planning.plan(ir)
assert found.total_remote_memory_bytes == 256 * 256 * 4 * size**2
assert found.peak_bytes >= 2 * 4 * size**2
print(found.phases[0].product_flops)
"""


@pytest.mark.slow
def test_a_program_far_larger_than_the_machine_is_planned_without_its_memory():
    done = subprocess.run(
        [sys.executable, "-c", HUGE],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 2 * (1 << 20) ** 3


def test_times_add_up_as_they_are_said_to():
    phase = plan(program()).phases[1]
    time = phase_time(phase, Machine(flops=1e3, link=1e2, remote=1e1))
    compute, link, remote = phase.flops / 1e3, phase.sent_bytes / 1e2, phase.remote_bytes / 1e1
    assert time == PhaseTime(compute, link, remote, time.exposed)
    assert (time.bound, time.seconds, time.limit) == ("remote", time.remote, time.remote)
    slow_links = PhaseTime(compute=2.0, link=5.0, remote=1.0, exposed=3.0)
    assert (slow_links.bound, slow_links.seconds, slow_links.limit) == ("links", 5.0, 2.0)


def test_rows_that_come_meanwhile_bound_no_phase():
    meanwhile = PhaseTime(compute=3.0, link=2.0, remote=4.0, exposed=2.0)
    assert (meanwhile.bound, meanwhile.seconds) == ("compute", 5.0)
    longer = PhaseTime(compute=3.0, link=2.0, remote=5.5, exposed=2.0)
    assert (longer.bound, longer.seconds) == ("remote", 5.5)


STEPS = (
    TimelineStep(begins="a", sent_bytes=3),
    TimelineStep(flops=2),
    TimelineStep(begins="b", sent_bytes=3),
    TimelineStep(ends="a"),
    TimelineStep(flops=1),
    TimelineStep(ends="b"),
)


@pytest.mark.parametrize(
    "steps, exposed",
    [
        (STEPS, 1 + 2),
        ((TimelineStep(flops=3), TimelineStep(times=5, steps=STEPS)), 5 * (1 + 2)),
        ((TimelineStep(begins="a", sent_bytes=3), TimelineStep(ends="a")), 3),
        ((TimelineStep(begins="a", sent_bytes=3), TimelineStep(flops=4), STEPS[3]), 0),
        (  # a message that began before a loop ends when it ends, however often the loop runs
            (
                TimelineStep(begins="c", sent_bytes=9),
                TimelineStep(times=5, steps=(TimelineStep(flops=1),)),
                TimelineStep(ends="c"),
            ),
            4,
        ),
        (  # and those of a loop come after it
            (TimelineStep(begins="c", sent_bytes=9), TimelineStep(times=5, steps=STEPS)),
            5 * (1 + 2) + 9,
        ),
    ],
)
def test_links_are_exposed_while_nothing_is_computed(
    steps: tuple[TimelineStep, ...], exposed: float
) -> None:
    phase = replace(plan(program()).phases[1], timeline=steps)
    assert phase_time(phase, Machine(flops=1, link=1, remote=1)).exposed == exposed


@pytest.mark.slow
def test_a_machine_can_be_measured():
    machine = measure()
    assert machine.flops > 1e8 and machine.link > 1e7 and machine.remote > 1e7


def test_a_sequence_evaluates_what_rows_follow_from_and_no_seeds(monkeypatch: Any):
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer((M,), popxl.float32, 9)

        def two_rows(
            row: popxl.TensorByRef, other: popxl.Tensor, seed: popxl.Tensor
        ) -> tuple[popxl.Tensor, popxl.Tensor]:
            seed, _ = ops.split_random_seed(seed)
            ops.remote_store(buffer, row, ops.remote_load(buffer, other))
            ops.add_(row, popxl.constant(2, popxl.int32))  # seen outside
            return row + popxl.constant(1, popxl.int32), seed

        row = popxl.variable(1, popxl.int32)
        seed = popxl.constant((1, 2), popxl.uint32)
        graph = ir.create_graph(two_rows, row, row, seed)
        other = row + popxl.constant(-1, popxl.int32)
        for _ in range(2):
            other, seed = ops.call(graph, row, other, seed)
    drawn: list[Any] = []
    monkeypatch.setattr(OPS["split_random_seed"], "host", lambda *given: drawn.append(given))
    found = [(event.kind, event.row) for event in sequence(ir)]
    assert found == [("load", 0), ("store", 1), ("load", 4), ("store", 3)]
    assert not drawn


def test_a_row_may_follow_from_the_only_piece_of_a_split():
    ir = popxl.Ir()
    with ir.main_graph:
        (rows,) = ops.split(popxl.constant(np.array([0, 2, 1]), popxl.int32), 1)
        x = ops.remote_load(popxl.remote_buffer((4,), popxl.float32, 3), rows[1:2])
        ops.host_store(popxl.d2h_stream(x.shape, x.dtype), x)
    assert [event.row for event in sequence(ir)] == [2]


def test_a_row_that_only_the_device_knows_has_no_sequence():
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer((M,), popxl.float32, 4)
        row = ops.cast(ops.host_load(popxl.h2d_stream((), popxl.float32)), popxl.int32)
        ops.remote_store(buffer, 0, ops.remote_load(buffer, row))
    with pytest.raises(
        GraphError, match="row whose number is on the device.*Compute it from small integers"
    ):
        list(sequence(ir))


def stored_by(change: Callable[[popxl.Tensor], popxl.Tensor]) -> popxl.Ir:
    """A program that stores the row whose number is what becomes of 0."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        buffer = popxl.remote_buffer((1,), popxl.float32, 4)
        row = change(popxl.constant([0], popxl.int32))
        ops.remote_store(buffer, row, popxl.constant(np.ones(1, np.float32)))
    return ir


def test_a_counter_that_is_written_through_a_view_is_followed():
    def by_two(n: popxl.Tensor) -> popxl.Tensor:
        ops.add_(n.reshape_(()), popxl.constant(2, popxl.int32))
        return n

    assert [event.row for event in sequence(stored_by(by_two))] == [2]


def test_a_row_whose_number_cannot_be_computed_is_refused_with_its_op():
    with pytest.raises(GraphError, match="0 in the divisor.*= div.*Compute it from small integers"):
        list(sequence(stored_by(lambda n: ops.div(popxl.constant([1], popxl.int32), n))))
