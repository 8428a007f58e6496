"""Sessions in several threads, in signal handlers, and in forks."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import popxl
import popxl_addons as addons
import pytest
from helpers.session_programs import counter
from popxl import extensions, ops
from popxl_addons import TaskSession

SIZE = 24
RUNS, THREADS = 400, 4
WEIGHTS = np.arange(SIZE * SIZE, dtype=np.float32).reshape(SIZE, SIZE) % 7


def weighted(kind: str = "compiled") -> tuple[popxl.Session, Any, Any, Any]:
    """(session of a program that multiplies what it loads by a variable, adds up what it has loaded
    in another, and stores the product; input stream; output stream; the sum's variable).
    """
    ir = popxl.Ir(2 if kind == "replicated" else 1)
    shape = (SIZE, SIZE)
    with ir.main_graph, popxl.in_sequence():
        into, out = popxl.h2d_stream(shape, popxl.float32), popxl.d2h_stream(shape, popxl.float32)
        w, total = popxl.variable(WEIGHTS), popxl.variable(np.zeros(shape, np.float32))
        x = ops.host_load(into)
        ops.host_store(out, ops.matmul(x, w))
        ops.var_updates.accumulate_(total, x)
    return popxl.Session(ir), into, out, total


def in_threads(work: Callable[[int], Any]) -> list[Any]:
    """What several threads return that all begin together, each given its number."""
    begin = threading.Barrier(THREADS)

    def begun(number: int) -> Any:
        begin.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(begun, range(THREADS)))


@pytest.mark.parametrize("kind", ["compiled", "interpreted", "replicated", "with_outputs"])
def test_runs_of_several_threads_give_each_its_own_results(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPXL_INTERPRET", "1" if kind == "interpreted" else "0")
    session, into, out, total = weighted(kind)
    runs = RUNS if kind == "compiled" else RUNS // 8
    lead = (2, 1, 1) if kind == "replicated" else (1, 1)

    def work(number: int) -> int:
        """How many of a thread's runs were wrong."""
        wrong = 0
        for i in range(runs):
            x = np.full((*lead[:-2], SIZE, SIZE), number * runs + i, np.float32)
            if kind == "with_outputs":
                outputs = session.create_host_outputs()
                session.run_with_outputs({into: x}, outputs)
            else:
                outputs = session.run({into: x})
            wrong += not np.array_equal(outputs[out], x @ WEIGHTS)
        return wrong

    with session:
        assert in_threads(work) == [0] * THREADS
    expected = sum(range(THREADS * runs))  # below 2**24: sums of float32 are exact
    assert (session.get_tensor_data(total) == expected).all()


def test_programs_of_their_own_run_in_several_threads_at_once() -> None:
    sessions = [weighted() for _ in range(THREADS)]

    def work(number: int) -> bool:
        session, into, out, total = sessions[number]
        with session:
            found = [
                session.run({into: np.full((SIZE, SIZE), number + i, np.float32)})[out]
                for i in range(RUNS // 4)
            ]
        sums = WEIGHTS.sum(axis=0)
        right = all((y == (number + i) * sums).all() for i, y in enumerate(found))
        loaded = sum(number + i for i in range(RUNS // 4))
        return right and bool((session.get_tensor_data(total) == loaded).all())

    assert all(in_threads(work))


def test_values_are_written_and_read_between_runs_of_other_threads() -> None:
    session, into, out, total = weighted()
    other = popxl.Session(session.ir)
    zeros = np.zeros((SIZE, SIZE), np.float32)

    def work(number: int) -> None:
        for i in range(RUNS // 8):
            if number == 0:
                session.run({into: np.full((SIZE, SIZE), i, np.float32)})
            elif number == 1:
                session.write_variable_data(total, zeros + 1000.0 * i)
            elif number == 2:
                with session, extensions.find_not_finite(session) as found:
                    session.weights_to_host()
                    session.weights_from_host()
                    extensions.replica_digests(session, [total])
                assert not found
            else:
                value = other.get_tensor_data(total)
                assert (value == value[0, 0]).all(), "half of one value, half of another"

    with session:
        in_threads(work)


def test_blocks_of_several_threads_are_left_with_the_last() -> None:
    session, into, _, total = weighted()
    ones = np.ones((SIZE, SIZE), np.float32)

    def work(_: int) -> None:
        for _ in range(RUNS // 8):
            with session:
                session.run({into: ones})

    in_threads(work)
    assert not session.is_attached
    assert (session.get_tensor_data(total) == THREADS * (RUNS // 8)).all()


def test_a_block_that_changes_what_runs_do_is_one_threads_at_a_time() -> None:
    ir, _, _ = counter()
    session = popxl.Session(ir)
    words = (
        "find_not_finite: got a block while another thread has one of this session's open; "
        "expected one thread to open them. Leave the other one first."
    )
    with session, extensions.profile(session) as profiles, ThreadPoolExecutor(1) as pool:
        pool.submit(session.run).result()
        with pytest.raises(RuntimeError) as refusal:
            pool.submit(lambda: extensions.find_not_finite(session).__enter__()).result()
        with extensions.find_not_finite(session):  # of the same thread
            session.run()
        session.run()
    assert str(refusal.value) == words
    assert len(profiles) == 3
    with session, ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: extensions.find_not_finite(session).__enter__()).result()


@pytest.mark.parametrize("call", ["run", "get_tensors_data", "write_variables_data", "digests"])
def test_a_signal_handler_in_the_middle_of_a_run_is_refused_in_words(call: str) -> None:
    ir, v, out = counter()
    session = popxl.Session(ir)
    seen: list[str] = []
    plain = session._engine.run

    def handle(*_: Any) -> None:
        calls: dict[str, Callable[[], Any]] = {
            "run": session.run,
            "get_tensors_data": lambda: session.get_tensor_data(v),
            "write_variables_data": lambda: session.write_variable_data(v, np.float32(7)),
            "digests": lambda: extensions.replica_digests(session, [v]),
        }
        try:
            calls[call]()
        except RuntimeError as refusal:
            seen.append(str(refusal))

    def interrupted(*arrays: Any) -> None:
        signal.raise_signal(signal.SIGUSR1)
        plain(*arrays)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with session:
            session._engine.run = interrupted  # type: ignore[method-assign]
            assert session.run()[out] == 1
            session._engine.run = plain  # type: ignore[method-assign]
            handle()  # between runs, nothing is in the way
    finally:
        signal.signal(signal.SIGUSR1, before)
    where = "replica_digests" if call == "digests" else f"Session.{call}"
    assert seen == [
        f"{where}: got a call in the middle of another one of the same thread, from a signal "
        "handler or what a run calls; expected it before or after. Note there what is to be done, "
        "and do it between runs."
    ]


def test_a_signal_handler_does_not_wait_for_a_thread_that_waits_for_its_own(
    tmp_path: Path,
) -> None:
    """The lock of a TaskSession's run, which is in a block of several calls."""
    ir, v, out = counter()
    session = TaskSession([], [out], addons.NamedTensors(v=v), ir=ir)
    seen: list[str] = []

    def handle(*_: Any) -> None:
        with pytest.raises(RuntimeError) as refusal:
            session.save_checkpoint(str(tmp_path))
        seen.append(str(refusal.value).partition(";")[0])

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with session, ThreadPoolExecutor(1) as pool:
            with session._lock("weights_to_host"):
                run = pool.submit(session.run)
                while session._lock._outer_lock.acquire(blocking=False):
                    session._lock._outer_lock.release()  # until the run has it
                signal.raise_signal(signal.SIGUSR1)
            assert run.result(timeout=60)[out] == 1
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [
        "save_checkpoint: got a call in the middle of another one of the same thread, from a "
        "signal handler or what a run calls"
    ]


FORKS = """
import os, sys
import numpy as np
import popxl
import torch  # once, and not in a fork again
from popxl import extensions, ops

def program(size):
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        out = popxl.d2h_stream((size, size), popxl.float32)
        w = popxl.variable(np.ones((size, size), np.float32))
        ops.host_store(out, ops.matmul(w, w))
    return ir, w, out

def in_a_fork(*works):
    sys.stdout.flush()
    if not os.fork():
        for work in works:
            try:
                work()
            except RuntimeError as error:
                print(error)
        sys.exit()
    _, status = os.wait()
    print("child:", os.waitstatus_to_exitcode(status))

def new():
    ir, _, out = program(400)
    with popxl.Session(ir) as session:
        print(session.run()[out][0, 0])

in_a_fork(new)
ir, w, out = program(512)
session = popxl.Session(ir)
with session, extensions.profile(session):
    print(session.run()[out][0, 0])
    in_a_fork(
        session.run,
        lambda: session.get_tensor_data(w),
        lambda: session.write_variable_data(w, np.zeros((512, 512), np.float32)),
        lambda: extensions.replica_digests(session, [w]),
        lambda: popxl.Session(ir),
        new,
        lambda: torch.set_num_threads(1),
        new,
    )
    print(session.run()[out][0, 0])
"""


@pytest.mark.slow
def test_a_fork_refuses_its_parents_session_in_words() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    calls = ("Session.run", "Session.get_tensors_data", "Session.write_variables_data")
    refused = [
        f"{call}: got a fork of the process that made the program's session; expected that "
        "process. Read there what a fork needs, or start processes afresh: "
        "multiprocessing.get_context('spawn')."
        for call in (*calls, "replica_digests", "Session")
    ]
    with_threads = (
        "Session: got a fork of a process in which a session had been made; expected a fork "
        "before the first one, because the threads that multiply are missing and would be waited "
        "for. Start processes afresh, multiprocessing.get_context('spawn'), or set "
        "OMP_NUM_THREADS=1."
    )
    forked = [*refused, with_threads, "400.0", "child: 0"]  # at last with one thread
    expected = ["400.0", "child: 0", "512.0", *forked, "512.0"]
    assert done.stdout.splitlines() == expected, done.stderr
    assert done.stderr == ""


def rounding(is_stochastic: bool, seed: int) -> Callable[[], np.ndarray]:
    """A session of some hundred small updates of a variable of bfloat16: what it makes of that."""
    ir, size = popxl.Ir(), 4096
    ir._pb_ir.getSessionOptions().enableStochasticRounding = is_stochastic
    change = np.random.default_rng(seed).standard_normal(size).astype(np.float32) * 1e-3
    with ir.main_graph, popxl.in_sequence():
        w = popxl.variable(np.linspace(1, 2, size, dtype=np.float32), extensions.bfloat16)
        x = popxl.variable(change)
        for _ in range(200):
            ops.var_updates.accumulate_(w, x)
    session = popxl.Session(ir)

    def run() -> np.ndarray:
        with session:
            session.run()
        return np.array(session.get_tensor_data(w))

    return run


def test_programs_in_threads_round_each_as_it_says() -> None:
    kinds = [(True, 0), (False, 1), (True, 2), (False, 3)]
    alone = [rounding(*kind)() for kind in kinds]
    programs = [rounding(*kind) for kind in kinds]
    for found, expected in zip(in_threads(lambda number: programs[number]()), alone, strict=True):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(rounding(*kinds[1])(), alone[1])
