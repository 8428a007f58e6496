"""Limits of waiting, and jobs that are suspended and go on."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from helpers.processes import RANKED, environment, finish, start, wait_for_instances
from poprun import deadline
from poprun.deadline import Deadline
from poprun.heartbeat import ALIVE


def test_only_time_in_which_the_process_runs_counts(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(deadline.time, "monotonic", lambda: now[0])
    waiting = Deadline(5.0)
    now[0] += 1.0
    assert waiting.left() == 4.0
    now[0] += 3600.0
    assert waiting.left() == 2.0
    now[0] += 2.0
    assert waiting.left() == 0.0


HEARS = """
import socket, sys, time
from poprun.heartbeat import InstanceHeartbeat
before = socket.socket(fileno=int(sys.argv[1]))
heartbeat = InstanceHeartbeat(socket.socketpair()[0], before, 1, ["here", "there"], 6.0)
print("hears", flush=True)
sys.stdin.read()
heartbeat.stop()
"""


@pytest.mark.slow
def test_an_instance_that_was_stopped_waits_for_the_next_heartbeat_of_one_that_was_too():
    own, other = socket.socketpair()
    with own:
        process = subprocess.Popen(
            [sys.executable, "-c", HEARS, str(other.fileno())],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[other.fileno()],
            text=True,
        )
        other.close()
        assert process.stdout.readline() == "hears\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(7)  # longer than the limit; 2 s of it count, and 4 are left to send
        process.send_signal(signal.SIGCONT)
        time.sleep(0.5)
        own.sendall(ALIVE)
        time.sleep(0.5)
        assert finish(process, time.monotonic()).said == "" and process.returncode == 0


TALKS = """
import popdist
from popxl.extensions import gather
popdist.init()
gather(rank)
open(os.path.join(os.environ['NOTES'], f'{os.getpid()}'), 'w').close()
for turn in range(3):
    time.sleep(1.5 * rank)
    assert gather(rank) == [0, 1]
"""
"""One of the two waits for the other, most of the time."""


@pytest.mark.multi
def test_a_run_that_is_suspended_as_a_whole_goes_on(tmp_path):
    program = RANKED + TALKS
    options = ["--num-instances", 2, "--timeout", 3]
    process = start(options, ["-c", program], is_fork=False, NOTES=str(tmp_path))
    begin = time.monotonic()
    wait_for_instances(tmp_path, 2)
    everybody = [process.pid, *map(int, os.listdir(tmp_path))]
    time.sleep(0.5)
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(6)
    for pid in everybody:
        os.kill(pid, signal.SIGCONT)
    ended = finish(process, begin)
    assert (ended.code, ended.said) == (0, "")
