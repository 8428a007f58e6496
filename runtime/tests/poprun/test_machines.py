"""The command line of a run, and runs on several machines, which all are this one."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time

import pytest
from helpers.processes import (
    NOTED,
    environment,
    finish,
    free_port,
    launch,
    left_over,
    start,
    wait_for_instances,
)
from popdist.linking import make_listener
from poprun import launcher, wire
from poprun.rendezvous import Rendezvous

from tests import warm

pytestmark = pytest.mark.multi

IMPATIENT = "import sys, poprun.rendezvous; poprun.rendezvous.JOIN_SECONDS = 1; from poprun import launcher; "


def two_machines(index):
    return (
        f"--num-instances 2 --nnodes 2 --node-rank {index} --rdzv-endpoint "
        f"127.0.0.1:{free_port()} true"
    ).split()


def start_two_machines(program, port, instances, options=(), **more):
    """The launchers of a run on two machines, which both are this one."""
    options = [
        "--num-instances",
        instances,
        "--nnodes",
        2,
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        *options,
    ]
    return [start([*options, "--node-rank", index], program, **more) for index in range(2)]


@pytest.mark.parametrize("index", [0, 1])
def test_a_machine_that_does_not_meet_the_others_in_time_says_so_in_one_message(index):
    command = [
        warm.launcher(),
        "-c",
        IMPATIENT + "sys.exit(launcher.main(sys.argv[1:]))",
        *two_machines(index),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == 1
    assert re.fullmatch(
        f"poprun: machine {index} of 2 did not meet the others at 127.0.0.1:.*; .*\n", done.stderr
    )


@pytest.mark.parametrize("index", [0, 1])
def test_what_is_no_name_of_a_host_is_told_of_as_one_that_nobody_knows(index):
    options = ["--num-instances", 2, "--nnodes", 2, "--node-rank", index]
    command = [
        *(warm.launcher(), "-c", IMPATIENT + "sys.exit(launcher.main(sys.argv[1:]))"),
        *map(str, [*options, "--rdzv-endpoint", f"no..name:{free_port()}", "true"]),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == 1
    says = rf"poprun: machine {index} of 2 did not meet the others at no\.\.name:\d+ \(.*\); .*\n"
    assert re.fullmatch(says, done.stderr) and "Name or service not known" in done.stderr


LISTENS = {
    "a machine": (
        "sys.exit(launcher.main(sys.argv[1:]))",
        r"poprun: machine 1 .* \(what listens there says nothing\);",
    ),
    "an instance": (
        "import popdist; popdist.init()",
        r".*InstanceError: popdist: instance 1 did not reach instance 0 at 127.0.0.1:\d+ within 1 s "
        r"\(what listens there says nothing\);",
    ),
}


@pytest.mark.parametrize("who", LISTENS)
def test_a_port_where_something_else_listens_and_says_nothing_is_told_of(who):
    code, says = LISTENS[who]
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = str(silent.getsockname()[1])
        options = f"--num-instances 2 --nnodes 2 --node-rank 1 --rdzv-endpoint 127.0.0.1:{port} true".split()
        of_instance = {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        of_instance["LOCAL_WORLD_SIZE"] = "1"
        variables = environment(
            POPDIST_TIMEOUT="1", **(of_instance if who == "an instance" else {})
        )
        command = [warm.launcher(), "-c", IMPATIENT + code, *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables)
    assert done.returncode == 1
    assert re.fullmatch(says + ".*", done.stderr.splitlines()[-1])


@pytest.mark.parametrize("index", [0, 1])
def test_waiting_for_other_machines_ends_with_ctrl_c(index):
    code = (
        "import threading, os, signal; from poprun import launcher; import sys; import "
        "poprun.agent; "
    )
    code += (
        "threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start(); "
        "launcher.main(sys.argv[1:])"
    )
    command = [warm.launcher(), "-c", code, *two_machines(index)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_port_in_use_is_refused_at_once(capsys):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert launcher.main(["--num-instances", "2", "--master-port", str(port), "true"]) == 2
    assert f"got {port}, which is in use; expected a free port" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command, says",
    [
        ("--num-instances 2", "got no program; expected one after the options"),
        ("--num-instances 2 no-such-program", "'no-such-program', which is not found"),
        ("--num-instances 0 true", "--num-instances: got 0; expected at least 1"),
        (
            "--num-replicas 5 --num-instances 2 true",
            "got 5 for 2 instances; expected a multiple of the instances. Use",
        ),
        ("--num-instances 3 --nnodes 2 --rdzv-endpoint a:1 true", "got 3 on 2 machines"),
        ("--num-instances 2 --nnodes 2 true", "without the first one's address"),
        ("--num-instances 2 --nnodes 2 --node-rank 2 true", "--node-rank: got 2; expected 0 to 1"),
        ("--rdzv-endpoint host true", "--rdzv-endpoint: got 'host'; expected HOST:PORT"),
        ("--master-port 70000 true", "--master-port: got 70000"),
        ("--grace -5 true", "--grace: got -5.0; expected 0 or more"),
        ("--grace nan true", "--grace: got nan; expected 0 or more"),
    ],
)
def test_command_lines_that_cannot_run_are_refused_in_one_sentence(command, says, capsys):
    assert launcher.main(command.split()) == 2
    said = capsys.readouterr().err
    assert says in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "words", ["--rdzv-endpoint [fd00::1]:29500", "--master-addr [fd00::1] --master-port 29500"]
)
def test_the_brackets_of_an_address_are_no_part_of_it(words):
    several = "--nnodes 2 --num-instances 2 --node-rank 1"
    options = launcher.parser().parse_args([*several.split(), *words.split(), "true"])
    launcher.check(options)
    assert (options.master_addr, options.master_port) == ("fd00::1", 29500)


@pytest.fixture
def debian(monkeypatch):
    """The first machine, named head, where that name stands for 127.0.1.1."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    resolve = socket.getaddrinfo

    def resolve_here(host, *rest, **more):
        return resolve("127.0.1.1" if host == "head" else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_here)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")


def is_reached(port):
    """Whether the machine is reached by an address that is not the one of its name."""
    with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 10).close()
        return True
    return False


def test_the_store_is_reached_where_the_machines_name_stands_for_a_loopback_address(debian):
    with wire.listen_for_others(("head", free_port())) as listener:
        assert is_reached(listener.getsockname()[1])


def test_instances_are_reached_where_the_machines_name_stands_for_a_loopback_address(debian):
    point = Rendezvous(("head", free_port()), b"that of these tests", False)
    listener, told = make_listener(point, 0)
    with listener:
        host, port = told
        assert host == "head" and is_reached(port)


def test_an_instance_listens_at_the_named_interface_only(debian, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    point = Rendezvous(("head", free_port()), b"that of these tests", False)
    listener, told = make_listener(point, 0)
    with listener:
        host, port = told
        assert host == "127.0.0.1" and not is_reached(port)


def test_the_store_is_reached_at_an_address_that_only_others_know():
    with wire.listen_for_others(("192.0.2.1", free_port())) as listener:
        assert is_reached(listener.getsockname()[1])


def test_at_a_loopback_address_nothing_listens_elsewhere():
    with wire.listen_for_others(("127.0.0.1", free_port())) as listener:
        assert not is_reached(listener.getsockname()[1])


def threads_of_each(instances):
    options = launcher.parser().parse_args(["--num-instances", str(instances), "true"])
    launcher.check(options)
    return launcher.environment(options).get("OMP_NUM_THREADS")


def test_threads_are_divided_evenly_unless_the_user_says_how_many(monkeypatch):
    monkeypatch.setattr(launcher, "usable_cores", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert (threads_of_each(3), threads_of_each(32)) == ("5", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads_of_each(3) is None


def test_instances_talk_by_the_interface_of_the_first_machines_address():
    assert (
        launcher.interface_towards("127.0.0.1") == launcher.interface_towards("localhost") == "lo"
    )
    assert launcher.interface_towards("no-such-host.invalid") is None
    assert launcher.interface_towards("no..name") is None


def test_an_interface_that_is_not_there_is_refused_at_once():
    ended = launch(
        ["--num-instances", 2],
        ["-c", "import popdist; popdist.init()"],
        GLOO_SOCKET_IFNAME="lo,eth77",
    )
    assert ended.code == 1
    says = (
        "environment variable GLOO_SOCKET_IFNAME: got 'eth77'; expected a network interface of "
        "this machine, of "
    )
    assert says in ended.last_line and ended.seconds < 30


@pytest.mark.parametrize(
    "content, code, says",
    [
        ("exit\n", 126, "Exec format error"),
        ("#!/no/such/shell\n", 127, "No such file or directory"),
        ("#!/\n", 126, "Permission denied"),
    ],
)
def test_a_program_that_the_system_cannot_run_is_told_of_in_one_line(content, code, says, tmp_path):
    program = tmp_path / "program"
    program.write_text(content)
    program.chmod(0o755)
    command = [warm.launcher(), "-m", "poprun", "--num-instances", "2", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == code
    line = f"poprun: got program {str(program)!r}, which does not start ({says}); expected one"
    assert line in done.stderr and done.stderr.count(line) == 1, done.stderr
    assert "Traceback" not in done.stderr


SHARE = """
import json, os, sys
names = "RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
names.append("POPDIST_NUM_TOTAL_REPLICAS")
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    json.dump([os.environ[name] for name in names] + sys.argv[2:], file)
"""


def test_each_machine_starts_its_own_share_of_the_instances_with_torchruns_environment(tmp_path):
    port = free_port()
    program = ["-c", SHARE, tmp_path, "$RANK ${local_rank} $$ $"]
    machines = start_two_machines(program, port, 4, ["--num-replicas", 8])
    ended = [finish(machine, time.monotonic()) for machine in machines]
    assert [(e.code, e.said) for e in ended] == [(0, ""), (0, "")]
    found = {name: json.loads((tmp_path / name).read_text()) for name in os.listdir(tmp_path)}
    rest = ["127.0.0.1", str(port), "8", program[-1]]
    assert found == {str(r): [str(r), str(r % 2), str(r // 2), "4", "2", *rest] for r in range(4)}


def test_machines_with_different_options_are_refused_on_each():
    port, begin = free_port(), time.monotonic()
    common = ["--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{port}"]
    numbers = [["--num-instances", 4], ["--num-instances", 2]]
    machines = [
        start([*common, *n, "--node-rank", i], ["-c", "print('ran')"])
        for i, n in enumerate(numbers)
    ]
    ended = [finish(machine, begin) for machine in machines]
    each = [
        f"--num-replicas {n} --num-instances {n} --nnodes 2 on machine {i}"
        for i, n in enumerate((4, 2))
    ]
    assert [(e.code, e.said) for e in ended] == [
        (2, f"poprun: got {ours} and {theirs}; expected the same on all. Change one of them.\n")
        for ours, theirs in (each, reversed(each))
    ]
    assert all(e.seconds < 40 for e in ended)


ENDS_ELSEWHERE = {
    "fails after that of machine 0 has succeeded": (
        1,
        "sys.exit() if rank == 0 else (time.sleep(3), sys.exit(5))",
        5,
    ),
    "fails while that of machine 1 talks to nobody": (
        0,
        "sys.exit(5) if rank == 0 else time.sleep(90)",
        5,
    ),
    "is killed": (1, "time.sleep(90) if rank == 0 else os.kill(os.getpid(), 9)", 137),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", ENDS_ELSEWHERE)
def test_an_instance_that(case, tmp_path):
    """.. ends the run on both machines, and both say which it was."""
    failing, code, exit_code = ENDS_ELSEWHERE[case]
    begin = time.monotonic()
    machines = start_two_machines(["-c", NOTED + code], free_port(), 2, NOTES=str(tmp_path))
    ended = [finish(machine, begin) for machine in machines]
    assert [e.code for e in ended] == [exit_code] * 2, ended
    assert all(e.seconds < 40 for e in ended)
    assert not left_over(tmp_path)
    happened = (
        rf"instance {failing} \(process \d+\) (ended with exit code 5|was killed by SIGKILL)\."
    )
    assert re.match(f"poprun: {happened}", ended[failing].last_line)
    assert re.fullmatch(
        f"poprun: machine {failing}: {happened} What runs here was ended.\n",
        ended[1 - failing].said,
    )


def test_a_launcher_that_is_killed_on_the_first_machine_ends_the_other(tmp_path):
    begin = time.monotonic()
    machines = start_two_machines(
        ["-c", NOTED + "time.sleep(90)"], free_port(), 2, NOTES=str(tmp_path)
    )
    wait_for_instances(tmp_path, 2)
    machines[0].kill()
    ended = [finish(machine, begin) for machine in machines]
    assert (ended[1].code, ended[1].said) == (
        1,
        "poprun: machine 0: its poprun is gone. What runs here was ended.\n",
    )
    assert ended[1].seconds < 40
    assert not left_over(tmp_path)
