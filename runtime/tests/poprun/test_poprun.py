"""How the instances of a run on one machine end. Programs without collectives need no torch, and
start at once.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.processes import (
    NOTED,
    RANKED,
    SECONDS,
    environment,
    finish,
    free_port,
    launch,
    left_over,
    start,
    wait_for_instances,
)

from tests import warm

pytestmark = pytest.mark.multi

FAILURES = {
    "an exit code": ("sys.exit('boom') if rank == 1 else time.sleep(90)", 1, r"[1] boom"),
    "silence": (
        "sys.exit(7) if rank == 1 else time.sleep(90)",
        7,
        "ended with exit code 7. It said nothing.",
    ),
    "a kill": (
        "os.kill(os.getpid(), 9) if rank == 1 else time.sleep(90)",
        137,
        "was killed by SIGKILL",
    ),
    "a signal without a name": (
        "os.kill(os.getpid(), 40) if rank == 1 else time.sleep(90)",
        168,
        "was killed by signal 40.",
    ),
    "a stop": (
        "os.kill(os.getpid(), signal.SIGSTOP) if rank == 1 else time.sleep(90)",
        137,
        "was stopped",
    ),
    "a deaf one": (
        "signal.signal(15, signal.SIG_IGN); sys.exit('boom') if rank == 0 else time.sleep(90)",
        1,
        "boom",
    ),
    "what follows from a kill": (
        "os.kill(os.getpid(), 9) if rank == 2 else (time.sleep(1), sys.exit('lost instance 2'))",
        137,
        "instance 2 (process ",
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("failure", FAILURES)
def test_one_failing_instance_ends_all_and_has_the_last_word(failure, tmp_path):
    code, exit_code, says = FAILURES[failure]
    ended = launch(["--num-instances", 3], ["-c", NOTED + code], NOTES=str(tmp_path))
    assert ended.code == exit_code
    assert says in ended.last_line
    assert ended.seconds < 30
    assert len(os.listdir(tmp_path)) == 3 and not left_over(tmp_path)


OTHERS_FOLLOW = """
def leave(*_):
    time.sleep(1)
    sys.exit("lost the other")
signal.signal(15, leave) if rank == 0 else (print("boom", file=sys.stderr, flush=True), time.sleep(1), sys.exit(1))
time.sleep(90)
"""


def test_what_others_say_while_they_are_ended_does_not_come_after_the_cause():
    ended = launch(["--num-instances", 2], ["-c", RANKED + "\n" + OTHERS_FOLLOW])
    assert (ended.code, ended.said) == (1, "[1] boom\n")


def test_a_cause_that_others_have_spoken_after_is_named_at_the_end():
    code = (
        "(time.sleep(6), print('so long', file=sys.stderr, flush=True), time.sleep(90)) if rank "
        "== 0 else "
    )
    code += "(print('boom', file=sys.stderr, flush=True), time.sleep(7), sys.exit(3))"
    ended = launch(["--num-instances", 2], ["-c", RANKED + code])
    assert ended.code == 3
    *before, last = ended.said.splitlines()
    assert before == ["[1] boom", "so long"]
    assert re.match(
        r"poprun: instance 1 \(process \d+\) ended with exit code 3. What it said is above.", last
    )


@pytest.mark.parametrize("late", [0, 1])
def test_what_all_instances_say_when_they_fail_alike_is_said_once(late):
    code = (
        f"print('error: a wrong value', file=sys.stderr, flush=True); rank == {late} and "
        "time.sleep(2); sys.exit(2)"
    )
    ended = launch(["--num-instances", 3], ["-c", RANKED + code])
    assert (ended.code, ended.said) == (2, "error: a wrong value\n")


def test_a_failure_is_named_where_the_words_before_it_are_also_another_instances():
    code = (
        "print('warning: old', file=sys.stderr, flush=True); time.sleep(1); rank and os._exit(7); "
        "time.sleep(90)"
    )
    ended = launch(["--num-instances", 2], ["-c", RANKED + code])
    assert ended.code == 7
    assert re.fullmatch(
        r"warning: old\npoprun: instance 1 \(process \d+\) ended with exit code 7\. What it said "
        r"is above\. The others were ended\.\n",
        ended.said,
    )


def test_instances_that_succeed_pass_on_what_they_say():
    ended = launch(
        ["--num-instances", 2], ["-c", RANKED + "print('warning', rank, file=sys.stderr)"]
    )
    assert ended.code == 0
    assert sorted(ended.said.splitlines()) == ["[1] warning 1", "warning 0"]


def start_two(code: str, notes: Path, *flags: object) -> "tuple[subprocess.Popen, float]":
    """Two instances that run some code and then sleep, once they are there, and when they were
    started.
    """
    words = ["-c", RANKED + code + NOTED + "time.sleep(90)"]
    process, begin = (
        start(["--num-instances", 2, *flags], words, NOTES=str(notes)),
        time.monotonic(),
    )
    wait_for_instances(notes, 2)
    return process, begin


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_reaches_instances_which_may_finish(number, tmp_path):
    handle = (
        f"signal.signal({number:d}, lambda *_: (print('saved', rank, file=sys.stderr), "
        "sys.exit(0))); "
    )
    process, begin = start_two(handle, tmp_path)
    process.send_signal(number)
    ended = finish(process, begin)
    assert ended.code == 128 + number
    told, *saved = ended.said.splitlines()
    name = signal.Signals(number).name
    assert told == (
        f"poprun: got {name}; instances have 60 s to finish (--grace). Ctrl-C or SIGTERM, a "
        "second later or more, ends them at once."
    )
    assert sorted(saved) == ["[1] saved 1", "saved 0"]
    assert not left_over(tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "number, grace, again",
    [
        (signal.SIGTERM, 0.5, None),
        (signal.SIGTERM, 60, signal.SIGINT),
        (signal.SIGINT, 60, signal.SIGINT),
        (signal.SIGTERM, 60, signal.SIGTERM),
        (signal.SIGHUP, 60, signal.SIGTERM),
    ],
    ids=["in time", "at Ctrl-C", "at Ctrl-C once more", "at SIGTERM once more", "at SIGTERM"],
)
def test_instances_that_do_not_finish_after_a_signal_are_ended(number, grace, again, tmp_path):
    deaf = "".join(f"signal.signal({each}, signal.SIG_IGN); " for each in (1, 2, 15))
    process, begin = start_two(deaf, tmp_path, "--grace", grace)
    process.send_signal(number)
    if again:
        time.sleep(1.2)
        process.send_signal(again)
    ended = finish(process, begin)
    assert ended.code == 128 + number and ended.seconds < 30
    assert re.fullmatch("poprun: got .* a second later or more, ends them at once.\n", ended.said)
    assert not left_over(tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "numbers, pause",
    [([signal.SIGTERM] * 20, 0.02), ([signal.SIGINT] * 40, 0.0), ([signal.SIGHUP] * 2, 1.2)],
    ids=["often", "a Ctrl-C that is sent often", "once more"],
)
def test_instances_may_finish_however_often_a_signal_comes(numbers, pause, tmp_path):
    finishing = (
        f"signal.signal({numbers[0]:d}, lambda *_: (signal.signal({numbers[0]:d}, signal.SIG_IGN), "
        "time.sleep(1.5), print('saved', rank, file=sys.stderr), sys.exit(0))); "
    )
    process, begin = start_two(finishing, tmp_path)
    for number in numbers:
        process.send_signal(number)
        time.sleep(pause)
    ended = finish(process, begin)
    assert ended.code == 128 + numbers[0], ended.said
    assert sorted(ended.said.splitlines()[1:]) == ["[1] saved 1", "saved 0"]
    assert not left_over(tmp_path)


@pytest.mark.parametrize(
    "number", [signal.SIGHUP, signal.SIGINT], ids=["nohup", "the background of a script"]
)
def test_a_run_that_ignores_a_signal_goes_on_after_one(number, tmp_path):
    code = (
        f"signal.signal({number:d}, signal.SIG_IGN); from poprun import launcher; "
        "sys.exit(launcher.main())"
    )
    words = [
        "-c",
        "import signal, sys; " + code,
        "--num-instances",
        "1",
        sys.executable,
        "-c",
        NOTED + "time.sleep(3)",
    ]
    process = subprocess.Popen([warm.launcher(), *words], env=environment(NOTES=str(tmp_path)))
    wait_for_instances(tmp_path, 1)
    time.sleep(1)
    process.send_signal(number)
    assert process.wait(timeout=60) == 0


LATE = {
    "starting": "time.sleep(90)",
    "opening connections": "from popdist import exchange; exchange.link_all = lambda *_: time.sleep(90); "
    "popdist.init()",
}


@pytest.mark.parametrize("place", LATE)
def test_ctrl_c_ends_instances_that_wait_for_one_that_is_still(place, tmp_path):
    code = f"popdist.init() if rank == 0 else exec({LATE[place]!r})"
    process = start(
        ["--num-instances", 2], ["-c", "import popdist; " + NOTED + code], NOTES=str(tmp_path)
    )
    begin = time.monotonic()
    wait_for_instances(tmp_path, 2)
    time.sleep(6)
    process.send_signal(signal.SIGINT)
    ended = finish(process, begin)
    assert ended.code == 128 + signal.SIGINT and ended.seconds < 40
    assert not left_over(tmp_path)


STARTS_ANOTHER = "import subprocess; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_instances_and_what_they_start_end_where_the_launcher_is_killed(tmp_path):
    sleep = NOTED + "time.sleep(90)"
    process = start(
        ["--num-instances", 2], ["-c", NOTED + STARTS_ANOTHER, sleep], NOTES=str(tmp_path)
    )
    begin = time.monotonic()
    wait_for_instances(tmp_path, 4)
    process.kill()
    assert finish(process, begin).code == -signal.SIGKILL
    until = time.monotonic() + 10
    while left_over(tmp_path) and time.monotonic() < until:
        time.sleep(0.02)
    assert not left_over(tmp_path)


COLLECTIVE = """
import os, sys, time
import numpy as np
import popxl, popdist
from popxl.ops.collectives import replicated_all_reduce_
mode, rank = sys.argv[1], popdist.getInstanceIndex()
if mode == "slow":
    popdist.init()
    time.sleep(4 * rank)
ir = popxl.Ir(replication="popdist")
with ir.main_graph:
    replicated_all_reduce_(popxl.variable(np.ones(4 + (mode == "program" and rank)), name="w"), "mean")
with popxl.Session(ir, "cpu") as session:
    session.run()
    if rank == 1 and mode == "exception":
        raise ValueError("bad luck")
    if rank == 1 and mode == "hang":
        time.sleep(90)
    session.run()
"""


HANGS = r"Instance 1 \(process \d+ on .*\) does not wait: it is at <string>:\d+ in (load, called at .* in )?<module>\.$"
"""What is said of one that sleeps, at the very end."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "mode, says",
    [
        ("exception", "[1] ValueError: bad luck"),
        ("hang", "replica 0 waits at %w_all_reduce = "),
        (
            "program",
            (
                "instance 0 has '%w: float32[4] = variable', instance 1 has '%w: float32[5] = "
                "variable'"
            ),
        ),
    ],
)
def test_errors_around_collectives_name_their_cause(mode, says):
    options = ["--num-instances", 2, "--timeout", 3]
    python = sys.executable if mode == "hang" else warm.python()  # a fork has more calls around it
    ended = launch(options, ["-c", COLLECTIVE, mode], python=python)
    assert ended.code == 1
    assert says in ended.last_line
    assert ended.said.count("Traceback") == 1
    if mode == "hang":
        assert re.search(HANGS, ended.last_line)


def test_a_program_may_take_one_instance_longer_to_build_than_others_wait_at_a_collective():
    options = ["--num-instances", 2, "--timeout", 2]
    ended = launch(options, ["-c", COLLECTIVE, "slow"], python=warm.python())
    assert (ended.code, ended.said) == (0, "")


OUT_OF_STEP = """
import sys
import numpy as np
import popxl, popdist
from popxl import ops
from popxl.ops.collectives import replicated_all_reduce
def program():
    ir = popxl.Ir(replication="popdist")
    with ir.main_graph, popxl.in_sequence():
        flag = popxl.h2d_stream((), popxl.bool, "flag")
        w = popxl.variable(np.ones(4, np.float32), name="w")
        branches = lambda t: replicated_all_reduce(t), lambda t: t + 1.0
        graphs = [ir.create_graph(fn, w.spec) for fn in branches]
        (y,) = ops.conditional(ops.host_load(flag), *graphs, then_inputs=[w], else_inputs=[w])
        ops.host_store(popxl.d2h_stream(y.shape, y.dtype, "y"), y)
    return popxl.Session(ir, "cpu"), flag
programs = dict(zip("AB", (program(), program())))
for name, branch in sys.argv[1:][popdist.getInstanceIndex()].split():
    session, flag = programs[name]
    with session:
        session.run({flag: branch == "+"})
"""


@pytest.mark.parametrize(
    "runs",
    [("A+ A+ B+", "A+ B+ B+"), ("A+ A-", "A- A+")],
    ids=["other programs", "other branches"],
)
def test_instances_that_are_out_of_step_do_not_combine_what_belongs_to_different_runs(runs):
    options = ["--num-instances", 2, "--timeout", 3]
    ended = launch(options, ["-c", OUT_OF_STEP, *runs], python=warm.python())
    assert ended.code == 1
    assert "replica 0 waits at " in ended.said and "did not answer in time" in ended.said


APART = """
import sys, time
from popdist import exchange, getInstanceIndex
from popxl.extensions import gather
def load():
    time.sleep(90)
if sys.argv[1] == "patient":
    exchange.PATIENT_SECONDS = 3
exchange.connect()
if getInstanceIndex() == 1:
    load()
gather(0, patiently=sys.argv[1] == "patient")
"""


@pytest.mark.parametrize("how", ["at once", "patient"])
def test_an_instance_that_hangs_outside_of_collectives_is_named_last_with_its_place(how):
    ended = launch(
        ["--num-instances", 3, "--timeout", 3 if how == "at once" else 60], ["-c", APART, how]
    )
    assert ended.code == 1 and ended.seconds < 40
    assert "Instance 2 waits, too: gathering values. Instance 1" in ended.last_line
    assert re.search(HANGS, ended.last_line)


def test_instances_that_no_launcher_started_end_one_after_another_without_a_word():
    code = "import time, popdist; popdist.init(); time.sleep(4 * popdist.getInstanceIndex())"
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment(**shared, RANK=rank),
            stderr=subprocess.PIPE,
        )
        for rank in ("0", "1")
    ]
    said = [process.communicate(timeout=SECONDS)[1] for process in started]
    assert [(process.returncode, text) for process, text in zip(started, said)] == [(0, b"")] * 2
