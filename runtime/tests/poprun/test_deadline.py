"""Limits of waiting, and jobs that are suspended and go on."""

import ast
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers.processes import (
    RANKED,
    environment,
    finish,
    free_port,
    start,
    wait_for_instances,
)
from popdist.linking import LinkError, link_all, make_listener
from poprun import deadline, wire
from poprun.deadline import Deadline
from poprun.heartbeat import ALIVE
from poprun.rendezvous import Rendezvous

RUNTIME = Path(__file__).parents[2]


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


def test_a_limit_within_another_ends_with_that_and_keeps_it_up_to_date(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(deadline.time, "monotonic", lambda: now[0])
    whole = Deadline(5.0)
    for _ in range(4):
        part = Deadline(3.0, within=whole)
        assert part.slice() == 1.0
        now[0] += 1.0
        assert part.left() <= 2.0
    now[0] += 1.0
    with pytest.raises(TimeoutError):
        part.slice()
    assert whole.left() == 0.0 and part.left() == 0.0


def test_of_a_look_up_in_which_the_process_was_stopped_little_counts(monkeypatch):
    """A look-up as of a name whose resolver takes its time to fail."""
    now, asked = [100.0], []

    def look_up(*address, **more):
        asked.append(address)
        now[0] += 3600.0
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(deadline.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    whole = Deadline(20.0)
    with pytest.raises(wire.Unreachable, match="Temporary failure in name resolution"):
        wire.connect(("head", 29500), b"", Deadline(1000.0, within=whole))
    assert len(asked) == 10 and whole.left() == 0.0


def test_a_look_up_takes_no_longer_than_the_limit_and_all_of_its_time_counts(monkeypatch):
    is_over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **more: is_over.wait(60))
    limit = Deadline(2.5)
    begin = time.monotonic()
    with pytest.raises(wire.Unreachable, match="its name is still being looked up"):
        wire.connect(("head", 29500), b"", limit)
    is_over.set()
    assert 2.5 <= time.monotonic() - begin < 30 and limit.left() <= 0


BY_THE_WALLS_CLOCK = {
    "popdist/exchange.py": ["wait"] * 3,  # its own, by a limit
    "popdist/messages.py": ["select", "wait"],  # slices
    "poprun/agent.py": ["monotonic"],  # how long a user has had since the first Ctrl-C
    "poprun/deadline.py": ["join", "join", "monotonic", "monotonic"],  # slices
    "poprun/hang_report.py": ["wait"],  # from one look to the next
    "poprun/heartbeat.py": ["wait"],  # from one heartbeat to the next
    "poprun/interfaces.py": ["getaddrinfo", "gethostbyname"],  # before anybody waits by a limit
    # how long text is held back, and from one look to the next
    "poprun/log_mux.py": ["monotonic"] * 4 + ["select"],
    "poprun/store.py": ["wait_for"],  # a slice
    "poprun/wire.py": ["getaddrinfo", "select", "select", "settimeout"],  # slices
}


def test_no_wait_of_the_launcher_or_between_instances_is_by_the_walls_clock():
    clocks = ("monotonic", "settimeout", "create_connection", "wait_for", "time", "perf_counter")
    lookups = ("getaddrinfo", "gethostbyname")
    with_seconds = ("join", "wait", "select", "poll", "acquire")
    found = {}
    for path in sorted([*RUNTIME.glob("poprun/*.py"), *RUNTIME.glob("popdist/*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            called = getattr(node, "func", None)
            name = getattr(called, "attr", None)
            waits = name in with_seconds and (node.args or node.keywords)
            if name in (*clocks, *lookups) or waits and not isinstance(called.value, ast.Constant):
                found.setdefault(str(path.relative_to(RUNTIME)), []).append(name)
    assert {path: sorted(names) for path, names in found.items()} == BY_THE_WALLS_CLOCK


def test_who_sends_a_byte_at_a_time_holds_nothing_longer_than_the_limit():
    near, far = socket.socketpair()
    is_over = threading.Event()

    def trickle():
        with contextlib.suppress(OSError):
            while not is_over.wait(0.05):
                far.send(b"x")

    sender = threading.Thread(target=trickle)
    with near, far:
        sender.start()
        with pytest.raises(TimeoutError):
            wire.receive_exactly(near, 10000, Deadline(0.3))
        is_over.set()
        sender.join()


def test_what_is_larger_than_the_connection_takes_at_once_is_sent_whole_or_not_in_time():
    near, far = socket.socketpair()
    data = os.urandom(2**22)
    with near, far:
        found = []
        receiver = threading.Thread(target=lambda: found.append(wire.receive_exactly(far, 2**22)))
        receiver.start()
        wire.send_all(near, data, Deadline(30.0))
        receiver.join()
        assert found == [data]
        with pytest.raises(TimeoutError):
            wire.send_all(near, data, Deadline(0.1))


def start_with(connection: socket.socket, script: str, *words: object) -> subprocess.Popen:
    """A Python program that is given a connection, by its descriptor, and words."""
    number = connection.fileno()
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(number), *map(str, words)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[number],
        text=True,
    )
    connection.close()
    return process


HEARS = """
import socket, sys, time
from poprun.heartbeat import InstanceHeartbeat
before = socket.socket(fileno=int(sys.argv[1]))
heartbeat = InstanceHeartbeat(socket.socketpair()[0], before, 1, ["here", "there"], 6.0)
print("hears", flush=True)
sys.stdin.read()
heartbeat.stop()
"""


def suspend(process: subprocess.Popen, seconds: float) -> None:
    """The time from which it stands still."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    time.sleep(seconds)
    process.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_an_instance_that_was_stopped_waits_for_the_next_heartbeat_of_one_that_was_too():
    own, other = socket.socketpair()
    with own, start_with(other, HEARS) as process:
        assert process.stdout.readline() == "hears\n"
        suspend(process, 7)  # longer than the limit; 2 s of it count, and 4 are left to send
        time.sleep(0.5)
        own.sendall(ALIVE)
        time.sleep(0.5)
        assert finish(process, time.monotonic()).said == "" and process.returncode == 0


WAITS = """
import json, socket, sys, threading
from popdist.linking import LinkError, link_all, make_listener
from poprun import store, wire
from poprun.deadline import Deadline
from poprun.rendezvous import Rendezvous
own, port = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
point = Rendezvous(("127.0.0.1", port), b"that of these tests", False)
door = wire.listen(("127.0.0.1", 0))
kept = store.Keeper(door, point.secret)
clients = [store.connect(door.getsockname(), point.secret, Deadline(8.0)) for _ in range(2)]
listener, address = make_listener(point, 1)
print(json.dumps(address), flush=True)
other = json.loads(sys.stdin.readline())
waits = {
    "bytes": lambda: wire.receive_exactly(own, 2, Deadline(8.0)),
    "a value": lambda: clients[0].get("key", Deadline(8.0)),
    "another instance": lambda: list(link_all(point, 1, listener, [other, address], 8.0).links),
}
said = {}
def wait(what):
    try:
        said[what] = waits[what]()
    except Exception as error:
        said[what] = error
threads = [threading.Thread(target=wait, args=(what,)) for what in waits]
for thread in threads:
    thread.start()
print("waits", flush=True)
sys.stdin.readline()
clients[1].set("key", "value")
for thread in threads:
    thread.join()
print([said[what] for what in waits], flush=True)
"""


@pytest.mark.slow
def test_a_process_that_was_stopped_goes_on_to_wait():
    """A wait of 9 s, by limits of 8 s: 2 s of them count."""
    own, other = socket.socketpair()
    point = Rendezvous(("127.0.0.1", free_port()), b"that of these tests", False)
    listener, address = make_listener(point, 0)
    with own, start_with(other, WAITS, point.address[1]) as process:
        theirs = json.loads(process.stdout.readline())
        process.stdin.write(json.dumps(address) + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "waits\n"
        suspend(process, 9)
        time.sleep(0.5)
        own.sendall(b"ab")
        process.stdin.write("now\n")
        process.stdin.flush()
        try:
            connections = link_all(point, 0, listener, [address, theirs], 30.0)
        except LinkError as error:
            pytest.fail(f"{error}; the process said {process.communicate(timeout=30)}")
        said, problem = process.communicate(timeout=30)
    assert (said, problem) == ("[b'ab', b'value', [0]]\n", "")
    for connection in (connections.following, connections.before, connections.links[1].connection):
        connection.close()


TALKS = """
import poprun.store
poprun.store.ANSWER_SECONDS = 8.0
import popdist
from popxl.extensions import gather
popdist.init()
gather(rank)
open(os.path.join(os.environ['NOTES'], f'{rank} {os.getpid()}'), 'w').close()
for turn in range(3):
    time.sleep(1.5 * rank)
    assert gather(rank) == [0, 1]
"""
"""One of the two waits for the other, most of the time."""


def processes_of(launchers, folder):
    """The processes of each machine, which has an instance."""
    wait_for_instances(folder, len(launchers))
    ranked = [sorted(name.split() for name in os.listdir(folder))[i] for i in range(len(launchers))]
    return [[launcher.pid, int(pid)] for launcher, (_, pid) in zip(launchers, ranked)]


def send(pids, number):
    for pid in pids:
        os.kill(pid, number)


@pytest.mark.multi
def test_a_run_that_is_suspended_as_a_whole_goes_on(tmp_path):
    options = ["--num-instances", 2, "--timeout", 6]
    process = start(options, ["-c", RANKED + TALKS], is_fork=False, NOTES=str(tmp_path))
    begin = time.monotonic()
    wait_for_instances(tmp_path, 2)
    everybody = [process.pid, *(int(name.split()[1]) for name in os.listdir(tmp_path))]
    time.sleep(0.5)
    send(everybody, signal.SIGSTOP)
    time.sleep(7)
    send(everybody, signal.SIGCONT)
    ended = finish(process, begin)
    assert (ended.code, ended.said) == (0, "")


IMPATIENT = (
    "import sys, poprun.store; poprun.store.ANSWER_SECONDS = 8.0; from poprun import launcher; "
)


@pytest.mark.multi
@pytest.mark.slow
def test_a_run_on_two_machines_that_is_suspended_as_a_whole_goes_on(tmp_path):
    """The machine that others ask stops a second before the other, and goes on a second later."""
    options = [
        *("--num-instances", "2", "--nnodes", "2", "--timeout", "8"),
        *("--rdzv-endpoint", f"127.0.0.1:{free_port()}"),
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", IMPATIENT + "sys.exit(launcher.main(sys.argv[1:]))", *options]
    program = [sys.executable, "-c", RANKED + TALKS]
    launchers = [
        subprocess.Popen(
            [*command, "--node-rank", str(machine), *program],
            env=environment(NOTES=str(tmp_path)),
            **pipes,
        )
        for machine in range(2)
    ]
    begin = time.monotonic()
    first, second = processes_of(launchers, tmp_path)
    for pids, seconds in ((first, 1), (second, 9)):
        send(pids, signal.SIGSTOP)
        time.sleep(seconds)
    for pids in (second, first):
        send(pids, signal.SIGCONT)
        time.sleep(1)
    ended = [finish(launcher, begin) for launcher in launchers]
    assert [(each.code, each.said) for each in ended] == [(0, "")] * 2
