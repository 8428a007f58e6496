"""`poprun --restarts`: all instances start again after a failure, and after nothing else. The
programs need no torch.
"""

import os
import signal
import subprocess
import sys
import time

import pytest
from helpers.processes import (
    NOTED,
    RANKED,
    environment,
    finish,
    free_port,
    launch,
    left_over,
    start,
    wait_for_instances,
)
from poprun import restarts

from tests import warm

pytestmark = pytest.mark.multi

STARTED = RANKED + "start = int(os.environ['POPDIST_RESTARTS'])\n"
ONCE = STARTED + r"print(f'rank {rank} start {start}\n', end='', flush=True)" + "\nif start == 0: "
"""The begin of a program that does something in its first start alone. It prints in one write:
lines of instances do not mix.
"""
FAILURES = {
    "an exit code": ("rank == 1 and sys.exit(70); time.sleep(90)", 70),
    "a kill": ("rank == 0 and os.kill(os.getpid(), 9); time.sleep(90)", 137),
    "a stop": ("rank == 1 and os.kill(os.getpid(), signal.SIGSTOP); time.sleep(90)", 137),
}
HANGS = """
from popdist import exchange
exchange.connect()
if start == 0 and rank == 1: time.sleep(90)
print(f"{exchange.gather(rank)}\\n", end="")  # one write: lines of instances do not mix
"""


def run(program, instances=2, **more):
    """The exit code of a launch, the lines that its instances printed, and what was said."""
    options = ["--num-instances", instances, "--restarts", 2, "--timeout", 2]
    process = start(options, ["-c", program], **more)
    printed, said = process.communicate(timeout=100)
    return process.returncode, sorted(printed.splitlines()), said


@pytest.mark.sampled(2)
@pytest.mark.parametrize("failure", FAILURES)
def test_all_instances_start_again_after(failure):
    program, code = FAILURES[failure]
    ended, printed, said = run(ONCE + program)
    assert ended == 0, said
    assert {line for line in printed if "start 0" not in line} == {
        "rank 0 start 1",
        "rank 1 start 1",
    }
    *_, restart, last = said.splitlines()
    assert restart == f"poprun: exit code {code}; all instances start again, restart 1 of 2."
    assert last == "poprun: ended with exit code 0 after 1 of 2 restarts."


def test_all_instances_start_again_after_one_that_the_others_wait_for_in_vain():
    ended, printed, said = run(STARTED + HANGS)
    assert (ended, printed) == (0, ["[0, 1]", "[0, 1]"]), said
    assert "restart 1 of 2." in said and "sleep" not in printed


LAUNCHERS = """
print(start, len(os.listdir(f"/proc/{os.getppid()}/fd")), flush=True)
sys.exit(5)
"""


def test_no_start_leaves_its_launcher_with_descriptors():
    ended, printed, said = run(STARTED + LAUNCHERS, instances=1)
    counts = [int(line.split()[1]) for line in printed]
    assert ended == 5 and len(counts) == 3 and counts[2] <= counts[1] <= counts[0] + 1, counts


def test_a_failure_that_comes_back_ends_the_run_after_the_last_restart():
    ended, printed, said = run(STARTED + "print(start, flush=True); sys.exit(5)", instances=1)
    assert (ended, printed) == (5, ["0", "1", "2"])
    assert said.splitlines()[-1] == "poprun: ended with exit code 5 after 2 of 2 restarts."


def test_no_restart_follows_a_refusal():
    ended, printed, said = run(STARTED + "print(start, flush=True); sys.exit(2)", instances=1)
    assert (ended, printed) == (2, ["0"]) and "start again" not in said


def test_refusals_divergence_and_signals_from_outside_are_no_failures():
    told = [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGPIPE]
    final = {0, 2, 3, 6, *(128 + number for number in told)}
    assert {code for code in range(256) if not restarts.is_failure(code)} == final


def test_no_restart_follows_a_signal_that_comes_while_a_failed_run_is_ended(tmp_path):
    program = (
        NOTED
        + "signal.signal(15, signal.SIG_IGN); rank == 1 and (time.sleep(1), sys.exit(5)); time.sleep(90)"
    )
    process = start(["--num-instances", 2, "--restarts", 2], ["-c", program], NOTES=str(tmp_path))
    begin = time.monotonic()
    wait_for_instances(tmp_path, 2)
    pids = {int(name) for name in os.listdir(tmp_path)}
    while len(left_over(tmp_path)) == 2:
        time.sleep(0.05)
    time.sleep(1)  # the other is asked to end meanwhile, and does not listen
    process.send_signal(signal.SIGTERM)
    ended = finish(process, begin)
    assert ended.code == 128 + signal.SIGTERM, ended.said
    assert {int(name) for name in os.listdir(tmp_path)} == pids
    assert not left_over(tmp_path)


def test_a_note_outlives_the_instances_and_not_the_launcher(tmp_path):
    program = (
        "import os, sys; from poprun.restarts import NOTE, leave_note, read_note\n"
        "print(os.environ[NOTE], read_note(), flush=True)\n"
        "sys.exit(leave_note(['a', 1]) or 7) if read_note() is None else None"
    )
    ended, printed, said = run(program, instances=1, TMPDIR=str(tmp_path))
    (path, first), (again, second) = (line.split(" ", 1) for line in printed)
    assert (ended, path) == (0, again), said
    assert sorted([first, second]) == ["None", "['a', 1]"]
    assert path.startswith(str(tmp_path)) and not os.path.exists(path)


def two_machines(program, module=("-m", "poprun"), **more):
    """The launchers of two machines, which both are this one."""
    common = ["--num-instances", 2, "--nnodes", 2, "--restarts", 2]
    address = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    return [
        subprocess.Popen(
            [
                *(warm.launcher(), *module),
                *map(str, (*common, *address, "--node-rank", index)),
                *(sys.executable, "-c", program),
            ],
            env=environment(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]


def test_instances_of_all_machines_start_again_after_one_has_failed():
    program = ONCE + "rank == 1 and os.kill(os.getpid(), 9); time.sleep(90)"
    machines = two_machines(program)
    for index, machine in enumerate(machines):
        printed, said = machine.communicate(timeout=100)
        assert machine.returncode == 0, said
        assert printed.splitlines()[-1] == f"rank {index} start 1"
        assert said.splitlines()[-1] == "poprun: ended with exit code 0 after 1 of 2 restarts."


def test_no_machine_starts_again_without_the_others(tmp_path):
    impatient = (
        "import sys, poprun.agent, poprun.heartbeat; from poprun import launcher; "
        "poprun.agent.GONE_SECONDS = poprun.heartbeat.LEAVE_SECONDS = 1; sys.exit(launcher.main())"
    )
    program = NOTED + "rank == 0 and (time.sleep(3), sys.exit(5)); time.sleep(90)"
    machines = two_machines(program, ("-c", impatient), NOTES=str(tmp_path))
    wait_for_instances(tmp_path, 2)
    machines[1].kill()
    ended = [finish(machine, time.monotonic()) for machine in machines]
    assert ended[0].code == 5
    assert "poprun: no restart: machine 1 is gone." in ended[0].said
    assert len(os.listdir(tmp_path)) == 2 and not left_over(tmp_path)


def test_machines_with_different_numbers_of_restarts_are_refused():
    common = ["--num-instances", 2, "--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    machines = [
        start([*common, "--node-rank", index, *more], ["-c", "print('ran')"])
        for index, more in enumerate((["--restarts", 1], []))
    ]
    ended = [finish(machine, time.monotonic()) for machine in machines]
    assert [each.code for each in ended] == [2, 2]
    assert "--nnodes 2 --restarts 1 on machine 0" in ended[1].said


def test_fewer_than_no_restarts_are_refused(capfd):
    ended = launch(["--restarts", -1], ["-c", "0"])
    assert (ended.code, ended.said) == (2, "poprun: --restarts: got -1; expected 0 or more.\n")
