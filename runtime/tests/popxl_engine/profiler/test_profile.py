"""Profiles of small programs: whatever the program, every moment and every byte goes to one phase
and one lane.
"""

import json
import re
import time
from collections import Counter
from typing import Any

import numpy as np
import popxl
import popxl_addons as addons
import pytest
import torch
from helpers.plan_programs import REPLICAS, ROWS, first_and_later_steps, program, row_phase
from helpers.row_programs import program as rows_program
from popxl import ops
from popxl.extensions import (
    FILES,
    LANES,
    PHASES,
    Profile,
    Span,
    Work,
    file_traffic,
    host_needs,
    keep_remote_memory_in_files,
    plan,
    profile,
    sequence,
    timeline,
)
from popxl_engine.machine import allocator
from popxl_engine.machine.paging import BLOCK
from popxl_engine.machine.replica import Replica
from popxl_engine.native import library
from popxl_engine.profiler import reading
from popxl_engine.profiler.clock import EventClock
from popxl_engine.profiler.memory import counter_of
from popxl_engine.profiler.reading import longest


def inputs_of(session: popxl.Session) -> dict[Any, np.ndarray]:
    rng = np.random.default_rng(7)
    return {
        s: rng.normal(size=session._full_input_shape(s.shape)).astype(np.float32)
        for s in session.expected_inputs()
    }


def profiled(ir: popxl.Ir, runs: int = 1) -> tuple[list[Profile], popxl.Session]:
    """Profiles of runs of a program."""
    session = popxl.Session(ir)
    with session, profile(session) as profiles:
        for _ in range(runs):
            session.run(inputs_of(session))
    return profiles, session


def of(spans: Any, replica: int, lane: str) -> list[Span]:
    """A replica's spans of one lane, in their order."""
    return [s for s in spans if s.replica == replica and s.lane == lane]


def paths(spans: list[Span]) -> list[tuple[str, ...]]:
    """The names of the spans around each span, outermost first, and its own. Fails where spans
    cross.
    """
    found, around = [], []
    for span in spans:
        while around and around[-1].end <= span.begin:
            around.pop()
        assert all(outer.begin <= span.begin and span.end <= outer.end for outer in around), span
        around.append(span)
        found.append(tuple(s.name for s in around))
    return found


# What is recorded


def test_a_profile_changes_no_bit_of_what_a_run_gives():
    sessions = [popxl.Session(program()) for _ in range(2)]
    results = []
    for is_profiled, session in enumerate(sessions):
        with session:
            session.run(inputs_of(session))
            if is_profiled:
                with profile(session):
                    values = session.run(inputs_of(session))
            else:
                values = session.run(inputs_of(session))
            results.append(
                [
                    *values.values(),
                    *(session.get_tensor_data(v) for v in session.ir.main_graph.variables),
                ]
            )
    for plain, recorded in zip(*results):
        np.testing.assert_array_equal(plain, recorded)


def test_programs_have_probes_in_the_block_and_nowhere_else(tmp_path, monkeypatch):
    monkeypatch.setenv("POPXL_CACHE_DIR", str(tmp_path))
    session = popxl.Session(program())
    (plain,) = tmp_path.glob("*.py")
    before = session._engine.program
    with session, profile(session):
        (probed,) = set(tmp_path.glob("*.py")) - {plain}
        recorded = session._engine.program
        assert recorded is not before
    with session, profile(session):
        assert session._engine.program is recorded, "written once"
    assert session._engine.program is before and "perf_counter" not in str(before.source.names)
    stamp = re.compile(r"^ +((log|rows)_\d+g\.append|enter_phase_\d+g\()")
    texts = [
        [line for line in path.read_text().splitlines() if not stamp.match(line)]
        for path in (plain, probed)
    ]
    assert len(texts[0]) == len(plain.read_text().splitlines()), (
        "no probes where nobody asks for them"
    )
    assert len(texts[0]) == len(texts[1]) < len(probed.read_text().splitlines()), (
        "and nothing else where they are"
    )


def test_spans_of_phases_lie_inside_each_other_and_others_follow_each_other():
    ((found,), _) = profiled(program())
    assert found.replicas == tuple(range(REPLICAS))
    for replica in found.replicas:
        nested = paths(of(found.spans, replica, PHASES))
        assert nested == [
            ("run",),
            ("run", "main"),
            ("run", "row_phase"),
            *(("run", "row_phase", f"row_phase {i + 1} of {ROWS}") for i in range(ROWS)),
            ("run", "final_phase"),
            ("run", "main"),
        ]
        others = sorted(
            (s for s in found.spans if s.replica == replica and s.lane != PHASES),
            key=lambda s: s.begin,
        )
        assert all(before.end <= after.begin for before, after in zip(others, others[1:]))
        assert all(found.begin <= s.begin <= s.end <= found.end for s in others)
        assert {s.lane for s in others} == {"compute", "load", "store", "collectives", "host I/O"}


def test_every_moment_of_a_run_goes_to_one_phase_and_one_lane():
    (profiles, _) = profiled(program(), runs=3)
    assert len(profiles) == 3
    for found in profiles:
        assert sum(sum(p.nanoseconds.values()) for p in found.phases) == found.end - found.begin
        assert all(
            set(p.nanoseconds) == set(LANES) and min(p.nanoseconds.values()) >= 0
            for p in found.phases
        )


def amounts(spans: list[Span]) -> Work:
    return Work.sum(span.work for span in spans)


def test_work_is_that_of_the_plan_and_so_is_the_sum_of_the_spans():
    ((found,), _) = profiled(program())
    expected = plan(program())
    assert [(p.name, p.runs) for p in found.phases] == [(p.name, p.runs) for p in expected.phases]
    for ours, theirs in zip(found.phases, expected.phases):
        assert ours.work == Work(
            flops=REPLICAS * theirs.flops,
            loaded_bytes=REPLICAS * theirs.loaded_bytes,
            stored_bytes=REPLICAS * theirs.stored_bytes,
            host_bytes=REPLICAS * theirs.host_bytes,
            sent_bytes=REPLICAS * theirs.sent_bytes,
        )
    assert amounts([s for s in found.spans if s.lane != PHASES]) == Work.sum(
        p.work for p in found.phases
    )
    for phase in found.phases:
        assert (
            amounts([s for s in found.spans if s.lane == PHASES and s.name == phase.name])
            == phase.work
        )
    rounds = [s for s in found.spans if s.name.startswith("row_phase ")]
    assert len(rounds) == REPLICAS * ROWS and amounts(rounds) == found.phases[1].work


def test_transfers_are_those_of_the_sequence_with_their_rows():
    ((found,), _) = profiled(program())
    for replica in found.replicas:
        mine = [
            s
            for s in found.spans
            if s.replica == replica and s.lane in ("load", "store", "collectives")
        ]
        seen = [(s.lane, s.row) for s in sorted(mine, key=lambda s: s.begin)]
        events = sequence(program(), replica)
        assert seen == [
            ("collectives", None) if e.kind == "collective" else (e.kind, e.row) for e in events
        ]


PAUSE = 0.1
"""Seconds; far more than anything that small programs do by themselves, on a busy machine, too."""


@pytest.mark.parametrize("kind", ["load", "store"])
def test_a_slow_transfer_is_what_its_phase_waited_for(kind: str, monkeypatch):
    original = getattr(Replica, f"remote_{kind}")

    def slow(self: Replica, *arguments: Any) -> Any:
        time.sleep(PAUSE if self.index == 1 else 0)
        return original(self, *arguments)

    monkeypatch.setattr(Replica, f"remote_{kind}", slow)
    ((found,), _) = profiled(program())
    _, rows, final = found.phases
    assert rows.nanoseconds[kind] >= ROWS * PAUSE * 1e9
    assert next(iter(rows.waits)) == kind and rows.waits[kind] > 0.5
    assert final.nanoseconds[kind] == 0
    for replica in found.replicas:
        (longest_wait,) = [sum(s.end - s.begin for s in of(found.spans, replica, kind))]
        assert (longest_wait >= ROWS * PAUSE * 1e9) == (replica == 1)
    waited = sum(s.end - s.begin for s in of(found.spans, 0, "collectives"))
    assert waited >= ROWS * PAUSE * 1e9, "the others stand in their collectives meanwhile"
    assert rows.nanoseconds["collectives"] < ROWS * PAUSE * 1e9, "but no moment is counted twice"


# Memory


K, ROWS_KEPT = 200, 4
"""A matrix has 160,000 bytes."""
MATRIX, SMALL = 4 * K * K, 2_000
"""Bytes; and of what the C library rounds up, and of scalars."""


def storing_phase(n: popxl.Tensor, x: popxl.Tensor, buffer: popxl.RemoteBuffer) -> Any:
    """Stores a product, which becomes the row, and has another product meanwhile."""
    ops.remote_store(buffer, n, x @ x)
    return n + 1, x + 1.0


def loading_phase(n: popxl.Tensor, total: popxl.Tensor, buffer: popxl.RemoteBuffer) -> Any:
    """Adds the square of a row, which is over."""
    row = ops.remote_load(buffer, n)
    return n + 1, total + row @ row


def rows_for_a_while() -> popxl.Ir:
    """Rows that one phase fills and another one reads."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence(True):
        buffer = popxl.remote_buffer((K, K), popxl.float32, ROWS_KEPT)
        x = popxl.variable(np.eye(K, dtype=np.float32))
        for phase in (storing_phase, loading_phase):
            n = popxl.constant(0, popxl.int32)
            graph = ir.create_graph(phase, n, x, buffer)
            _, x = ops.repeat(graph, ROWS_KEPT, n, x)
        ops.host_store(popxl.d2h_stream((), popxl.float32), ops.sum(x))
    return ir


needs_counter = pytest.mark.skipif(
    library.library() is None, reason="no C++ compiler: nobody counts tensors"
)


@needs_counter
def test_memory_of_a_phase_is_what_its_tensors_and_rows_have():
    (profiles, _) = profiled(rows_for_a_while(), runs=2)
    for found in profiles:
        storing, loading = (p.memory for p in found.phases if p.name.endswith("ing_phase"))
        # the variable, what is carried from round to round, and the product or the next of these
        assert storing.tensors == pytest.approx(3 * MATRIX, abs=SMALL)
        assert storing.rows == ROWS_KEPT * MATRIX, "each has its memory until it is read"
        # the variable, the total, a product, and maybe the sum of both
        assert loading.tensors in (
            pytest.approx(3 * MATRIX, abs=SMALL),
            pytest.approx(4 * MATRIX, abs=SMALL),
        )
        assert loading.rows == ROWS_KEPT * MATRIX


@needs_counter
def test_memory_of_a_phase_is_that_of_the_plan():
    for ir in (rows_for_a_while(), program()):
        needs = host_needs(ir)
        ((*_, found), _) = profiled(ir, runs=2)
        for phase in found.phases:
            rows, tensors = needs.phases[phase.name]
            assert phase.memory.rows == rows
            assert tensors <= phase.memory.tensors <= tensors + SMALL, phase.name


def test_the_resident_set_of_a_phase_has_what_it_took():
    nbytes = 64 * 2**20
    ir = popxl.Ir()
    with ir.main_graph:
        x = ops.host_load(popxl.h2d_stream((), popxl.float32))
        (y,) = ops.call(ir.create_graph(large_phase, x, nbytes // 4), x)
        ops.host_store(popxl.d2h_stream((), popxl.float32), y)
    ((found,), _) = profiled(ir)
    before, large = (p.memory.resident for p in found.phases)
    assert nbytes < large and before <= large


def large_phase(x: popxl.Tensor, elements: int) -> popxl.Tensor:
    return ops.sum(x + popxl.constant(np.arange(elements, dtype=np.float32)))


def test_without_an_allocator_nobody_counts_tensors(monkeypatch):
    monkeypatch.setattr(allocator, "_allocators", [])
    ((found,), _) = profiled(rows_for_a_while())
    assert {p.memory.tensors for p in found.phases} == {None}
    assert max(p.memory.rows for p in found.phases) == ROWS_KEPT * MATRIX


class Gpu:
    """Memory of a GPU that is not there, as PyTorch tells of it."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def take(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)

    def reset(self, _: Any) -> None:
        self.most = self.now


def test_tensors_of_a_gpu_are_counted_as_pytorch_counts_them(monkeypatch):
    gpu, device = Gpu(), torch.device("cuda", 0)
    gpu.take(1000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: gpu.now)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: gpu.most)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", gpu.reset)
    counter = counter_of(device)
    assert counter is not None
    with counter:
        for change in (500, -300, 50):
            gpu.take(change)
        assert (counter.take_most(), counter.take_most()) == (500, 250)
        counter.adjust(-200)
        gpu.take(10)
        assert counter.take_most() == 60


# Programs of other forms


def inner_phase(x: popxl.Tensor, steps: int) -> popxl.Tensor:
    """Doubles its input, in a loop in a loop."""
    graph = x.ir.create_graph(outer_body, x)
    (x,) = ops.repeat(graph, steps, x)
    return x


def outer_body(x: popxl.Tensor) -> popxl.Tensor:
    (x,) = ops.repeat(x.ir.create_graph(inner_body, x), 2, x)
    return x * 1.5


def inner_body(x: popxl.Tensor) -> popxl.Tensor:
    return x + 1.0


def test_loops_in_loops_are_spans_in_spans():
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence(True):
        x = ops.host_load(popxl.h2d_stream((3,), popxl.float32))
        (x,) = ops.call(ir.create_graph(inner_phase, x, steps=3), x)
        ops.host_store(popxl.d2h_stream((3,), popxl.float32), x)
    ((found,), _) = profiled(ir)
    rounds = [
        path[2:]
        for path in paths(of(found.spans, 0, PHASES))
        if path[1:2] == ("inner_phase",) and path[2:]
    ]
    assert rounds == [
        path
        for i in range(3)
        for path in (
            (f"outer_body {i + 1} of 3",),
            (f"outer_body {i + 1} of 3", "inner_body 1 of 2"),
            (f"outer_body {i + 1} of 3", "inner_body 2 of 2"),
        )
    ]
    (phase,) = [p for p in found.phases if p.name == "inner_phase"]
    assert phase.work.flops == 3 * 3 * (2 + 1)
    outer = [s for s in found.spans if s.name.startswith("outer_body")]
    assert [s.work.flops for s in outer] == [3 * (2 + 1)] * 3


def test_a_phase_that_is_called_again_has_a_span_each_time():
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence(True):
        x = ops.host_load(popxl.h2d_stream((3, 3), popxl.float32))
        square, add = ir.create_graph(squared_phase, x), ir.create_graph(inner_body, x)
        for graph in (square, add, square):
            (x,) = ops.call(graph, x)
        ops.host_store(popxl.d2h_stream((3, 3), popxl.float32), x)
    ((found,), _) = profiled(ir)
    names = [s.name for s in of(found.spans, 0, PHASES)][1:]
    assert [n for n in names if n != "main"] == ["squared_phase", "inner_body", "squared_phase"]
    assert [s.work.flops for s in found.spans if s.name == "squared_phase"] == [2 * 27] * 2
    assert [(p.name, p.runs, p.work.flops) for p in found.phases[1:]] == [
        ("squared_phase", 2, 4 * 27),
        ("inner_body", 1, 9),
    ]


def squared_phase(x: popxl.Tensor) -> popxl.Tensor:
    return x @ x


def test_a_main_graph_that_only_calls_is_a_phase_too():
    ir = popxl.Ir()
    with ir.main_graph:
        w = popxl.variable(np.ones((2, 2), np.float32))
        ops.call(ir.create_graph(growing_phase, w), w)
    ((found,), session) = profiled(ir)
    assert [(p.name, p.work.flops) for p in found.phases] == [("main", 0), ("growing_phase", 4)]
    assert sum(sum(p.nanoseconds.values()) for p in found.phases) == found.end - found.begin
    assert session.get_tensor_data(w).tolist() == [[2, 2], [2, 2]]


def growing_phase(w: popxl.TensorByRef) -> None:
    ops.add_(w, popxl.constant(1.0))


@pytest.mark.parametrize("number", [1.0, -1.0])
def test_of_a_branch_only_the_side_that_ran_is_there(number: float):
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence(True):
        x = ops.host_load(popxl.h2d_stream((3, 3), popxl.float32))
        condition = ops.greater(ops.sum(x), popxl.constant(0.0))
        then, other = ir.create_graph(squared_phase, x), ir.create_graph(inner_body, x)
        (y,) = ops.conditional(condition, then, other, [x], [x])
        ops.host_store(popxl.d2h_stream((3, 3), popxl.float32), y)
    session = popxl.Session(ir)
    with session, profile(session) as profiles:
        session.run({s: np.full((3, 3), number, np.float32) for s in session.expected_inputs()})
    names = Counter(s.name for s in profiles[0].spans if s.lane == "compute")
    assert (names["matmul"], names["add"]) == ((1, 0) if number > 0 else (0, 1))
    paths(of(profiles[0].spans, 0, PHASES))


def test_steps_of_one_run_are_spans_around_their_phases():
    ir = program(steps=3)
    addons.repeat_graph(ir.main_graph, 3)
    ((found,), _) = profiled(ir)
    assert found.steps == 3
    nested = paths(of(found.spans, 2, PHASES))
    for step in range(3):
        within = [path[2:] for path in nested if path[1:2] == (f"step {step + 1} of 3",)]
        assert [path[0] for path in within if len(path) == 1] == [
            "main",
            "row_phase",
            "final_phase",
            "main",
        ]
        assert len([path for path in within if "".join(path[-1:]).startswith("row_phase ")]) == ROWS
    once = profiled(program())[0][0]
    assert [p.work for p in found.phases] == [p.work.times(3) for p in once.phases]
    assert [p.runs for p in found.phases] == [3 * p.runs for p in once.phases]


def test_steps_within_steps_count_in_the_loop_that_they_are_of():
    ir = program(steps=6)
    for rounds in (3, 2):
        addons.repeat_graph(ir.main_graph, rounds)
    ((found,), _) = profiled(ir)
    assert found.steps == 6
    nested = paths(of(found.spans, 1, PHASES))
    counts = [
        tuple(" ".join(name.split()[1:]) for name in path[1:]) for path in nested if len(path) == 3
    ]
    expected = [(f"{n} of 2", f"{k} of 3") for n in (1, 2) for k in (1, 2, 3)]
    assert [count for count in counts if count in expected] == expected


@pytest.mark.parametrize("steps", [2, 4])
def test_a_first_step_before_a_loop_of_others_is_one_of_the_run(steps: int):
    ir = first_and_later_steps(steps)
    ((found,), _) = profiled(ir)
    expected = plan(ir)
    assert found.steps == steps
    works = {p.name: (p.runs, p.work) for p in found.phases}
    assert works == {
        p.name: (p.runs, Work(p.flops, p.loaded_bytes, p.stored_bytes, p.host_bytes))
        for p in expected.phases
    }
    nested = paths(of(found.spans, 0, PHASES))
    rounds = [path[1] for path in nested if len(path) == 2 and path[1].startswith("step")]
    assert rounds == ([f"step {n} of {steps}" for n in range(2, steps + 1)] if steps > 2 else [])
    layers = [
        path[-1]
        for path in nested
        if path[-1].startswith("first_and_later_steps.forward_and_store_phase ")
    ]
    name = "first_and_later_steps.forward_and_store_phase"
    assert layers == [f"{name} 1 of 2", f"{name} 2 of 2"] * (steps - 1)
    loads = Work.sum(span.work for span in of(found.spans, 0, "load"))
    assert loads.loaded_bytes == sum(p.loaded_bytes for p in expected.phases)


def test_a_run_that_fails_leaves_no_profile_and_the_next_one_a_whole_one(monkeypatch):
    session, original = popxl.Session(program()), Replica.remote_store
    with session:
        with profile(session) as profiles:
            with monkeypatch.context() as patch:
                patch.setattr(Replica, "remote_store", lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError, match="row_phase"):
                    session.run(inputs_of(session))
            assert Replica.remote_store is original
            session.run(inputs_of(session))
    (found,) = profiles
    assert len(paths(of(found.spans, REPLICAS - 1, PHASES))) == 5 + ROWS


def test_a_block_that_fails_leaves_the_program_without_probes():
    session = popxl.Session(program())
    before = session._engine.program
    with pytest.raises(KeyError), session, profile(session):
        raise KeyError
    assert session._engine.program is before


def test_an_interpreted_session_is_refused(monkeypatch):
    monkeypatch.setenv("POPXL_INTERPRET", "1")
    session = popxl.Session(program())
    with pytest.raises(
        RuntimeError, match="profile: got a session that interprets.*Unset POPXL_INTERPRET"
    ):
        with session, profile(session):
            pass


def test_where_rows_lie_in_files_reads_and_writes_are_spans_of_their_own(tmp_path):
    ir, _ = rows_program(2)
    keep_remote_memory_in_files(ir, str(tmp_path), 2 * 80_000)
    session = popxl.Session(ir)
    stores = [cache.transfers.store for cache in session._engine.machine.caches]
    with session:
        session.run()
        before = file_traffic(session)
        with profile(session) as profiles:
            session.run()
        after = file_traffic(session)
    assert [cache.transfers.store for cache in session._engine.machine.caches] == stores
    (found,) = profiles
    for lane, moved in zip(FILES, (after.reads - before.reads, after.writes - before.writes)):
        assert 0 < len([s for s in found.spans if s.lane == lane]) <= moved
        for replica in found.replicas:
            spans = of(found.spans, replica, lane)
            assert spans and all(
                first.end <= second.begin for first, second in zip(spans, spans[1:])
            )
            assert all(found.begin <= s.begin <= s.end <= found.end for s in spans)
            assert all(
                int(s.name.split()[0]) % BLOCK == 0 and s.name.endswith(" bytes") for s in spans
            )
    assert sum(sum(p.nanoseconds.values()) for p in found.phases) == found.end - found.begin
    assert amounts([s for s in found.spans if s.lane in LANES]) == Work.sum(
        p.work for p in found.phases
    )
    lanes = {
        e["args"]["name"] for e in timeline([found])["traceEvents"] if e["name"] == "thread_name"
    }
    assert lanes == {PHASES, *LANES, *FILES}


# The timeline


def test_the_timeline_is_a_trace_in_json():
    ((found,), _) = profiled(program())
    trace = json.loads(json.dumps(timeline([found])))
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        f"replica {i}" for i in range(REPLICAS)
    }
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    assert sorted(set(threads.values())) == sorted((PHASES, *LANES))
    complete = [e for e in events if e["ph"] == "X"]
    assert [e["ts"] for e in complete] == sorted(e["ts"] for e in complete)
    assert len(complete) == len(found.spans) and trace["otherData"]["spans left out"] == 0
    for event, span in zip(complete, found.spans):
        assert (
            threads[event["pid"], event["tid"]] == span.lane == event["cat"]
            and event["name"] == span.name
        )
        assert event["ts"] == pytest.approx((span.begin - found.begin) / 1e3)
        assert event["dur"] == pytest.approx((span.end - span.begin) / 1e3)
    (load, *_) = [e for e in complete if e["cat"] == "load"]
    assert load["args"]["loaded_bytes"] == 4 * 7 * 11 and load["args"]["row"] == ROWS - 1
    assert load["args"]["graph"] == row_phase.__name__ and "plan_programs.py:" in load["args"]["op"]
    (product, *_) = [e for e in complete if e["name"] == "matmul"]
    assert product["args"]["flops"] == 2 * 5 * 7 * 11 and product["args"]["GFLOP/s"] > 0


def test_of_very_many_spans_the_longest_are_kept_and_sums_stay(monkeypatch):
    monkeypatch.setattr(reading, "SPANS", 20)
    ((found,), _) = profiled(program())
    leaves = [s for s in found.spans if s.lane != PHASES]
    assert 0 < len(leaves) <= 20 and found.left_out > 0
    assert len([s for s in found.spans if s.lane == PHASES]) == REPLICAS * (5 + ROWS)
    assert sum(sum(p.nanoseconds.values()) for p in found.phases) == found.end - found.begin
    assert found.phases[1].work.flops == REPLICAS * plan(program()).phases[1].flops
    assert timeline([found])["otherData"]["spans left out"] == found.left_out


def test_the_longest_of_spans_are_told_from_the_others():
    spans = [Span(0, "compute", str(i), 0, length) for i, length in enumerate((5, 1, 4, 1, 3))]
    assert longest(spans, 5) == (spans, 0)
    assert longest(spans, 3) == ([spans[0], spans[2], spans[4]], 2)
    assert longest(spans, 4) == ([spans[0], spans[2], spans[4]], 2)


class Event:
    """An event of a GPU that passes it a while after the host."""

    passed = 0.0

    def __init__(self):
        Event.passed += 0.5
        self.at = Event.passed

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return other.at - self.at


def test_moments_of_a_gpu_are_when_it_passed_them_and_not_when_it_was_asked_to():
    clock = EventClock(Event)
    for _ in range(2):
        begin = time.perf_counter_ns()
        numbers = [clock.now() for _ in range(4)]
        times = clock.times(numbers[1:])
        assert [round(after - before) for before, after in zip(times, times[1:])] == [
            500_000,
            500_000,
        ]
        assert begin + 1_000_000 <= times[0] <= time.perf_counter_ns() + 1_000_000
