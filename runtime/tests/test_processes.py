"""Replicas over several processes: the same numbers as in one, and runs that end together."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import process_programs as programs
import pytest
from popdist import launcher
from process_programs import ASSIGNMENTS, GRADIENT_GROUPS, REPLICAS, results, values
from processes import SECONDS, environment, finish, is_alive, launch, start

pytestmark = pytest.mark.multi

SCRIPT = Path(programs.__file__)


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory):
    return results(str(tmp_path_factory.mktemp("one")))


def in_processes(folder, options, module="popdist.launcher", **environment):
    ended = launch(options, [SCRIPT, folder / "results.npz"], module, **environment)
    assert ended.code == 0, ended.said
    with np.load(folder / "results.npz") as found:
        return dict(found)


@pytest.mark.parametrize(
    "options, module, environment",
    [
        (["--num-replicas", REPLICAS, "--num-instances", 2], "popdist.launcher", {}),
        (["--num-replicas", REPLICAS, "--num-instances", 4], "popdist.launcher", {}),
        (
            ["--standalone", "--nproc-per-node", 2],
            "torch.distributed.run",
            {"POPXL_INTERPRET": "1", "POPDIST_NUM_TOTAL_REPLICAS": str(REPLICAS)},
        ),
    ],
    ids=["poprun-2", "poprun-4", "torchrun-2-interpreted"],
)
def test_numbers_do_not_depend_on_how_replicas_are_split_over_processes(
    in_one_process, tmp_path, options, module, environment
):
    found = in_processes(tmp_path, options, module, **environment)
    assert found.keys() == in_one_process.keys()
    different = [name for name, array in found.items() if array.tobytes() != in_one_process[name].tobytes()]
    assert not different
    check_against_numpy(found)
    file = np.fromfile(tmp_path / "files" / "file.npy", np.float32)
    np.testing.assert_array_equal(file.reshape(programs.SHAPE), values(*programs.SHAPE)[0])


def shards(array, size):
    flat = array[:7].reshape(-1)
    length = -(-flat.size // size)
    return np.pad(flat, (0, length * size - flat.size)).reshape(size, length)


ORACLES = {
    "sum": lambda x, i: x.sum(0),
    "mean": lambda x, i: x.mean(0),
    "max": lambda x, i: x.max(0),
    "square_add": lambda x, i: (x**2).sum(0),
    "in_place": lambda x, i: 2 * x.sum(0),
    "scatter": lambda x, i: shards(x.sum(0), len(x))[i],
    "gather": lambda x, i: np.concatenate(list(x), 1),
    "shard": lambda x, i: shards(x[i], len(x))[i],
    "slice": lambda x, i: np.split(x[i], len(x))[i].squeeze(0) if len(x) == 8 else np.split(x[i], len(x))[i],
}
"""From the operands of a group and a position in it to that member's result."""
GRADIENTS = {
    "identical_inputs": lambda x, i: 2 * x.sum(0),
    "identical_grad_inputs": lambda x, i: 2 * x.sum(0),
    "gather": lambda x, i: 2 * x[i],
    "shard": lambda x, i: np.concatenate(
        [2 * np.concatenate([shards(x[m], len(x))[m] for m in range(len(x))])[:21].reshape(7, 3), np.zeros((1, 3))]
    ),
    "slice": lambda x, i: 2 * np.concatenate([np.split(x[m], len(x))[m] for m in range(len(x))]),
}
"""The same for the gradient of the sum of the result's squares, by the operand."""


def check_against_numpy(found):
    x = values(*programs.SHAPE)
    for group_name, assignment in ASSIGNMENTS.items():
        for replica, group in enumerate(assignment):
            members = [r for r in range(REPLICAS) if assignment[r] == group]
            for name, oracle in ORACLES.items():
                expected = oracle(x[members], members.index(replica))
                np.testing.assert_allclose(found[f"{name}/{group_name}"][replica], expected, rtol=1e-5, atol=1e-6)
            for name, oracle in GRADIENTS.items() if group_name in GRADIENT_GROUPS else ():
                expected = oracle(x[members], members.index(replica))
                np.testing.assert_allclose(found[f"gradient/{name}/{group_name}"][replica], expected, rtol=1e-5)
    line, firsts = np.linspace(-1, 1, 9001, dtype=np.float32), x[:, 0, 0]
    np.testing.assert_allclose(found["large/mean/all"][5], line * firsts.mean(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["large/square_add/strided"][1], line**2 * (firsts[1::2] ** 2).sum(), rtol=1e-4)
    for replica in range(REPLICAS):
        pair = x[[replica % 4, replica % 4 + 4]]
        expected = pair.mean(0) if replica % 2 else (pair.max(0) + pair).sum(0)
        np.testing.assert_allclose(found["branches"][replica], expected, rtol=1e-5, atol=1e-6)
    expected = {
        "own": 2 * x,
        "one": x[0],
        "every": x,
        "mirrored": x[[0, 1, 4, 5]],
        "paired": x[::2],
        "sharded": x[0] + np.concatenate([np.split(x[r].reshape(-1), 8)[r] for r in range(8)]).reshape(x[0].shape),
        "file": x[0],
    }
    halves = x.reshape(2, 4, 2, 12)  # member m of group g is replica 4 * m + g
    change = np.stack([np.concatenate([halves[m, g, m] for m in range(2)]) for g in range(4)])
    expected["remote"] = x[:4] + change.reshape(4, *programs.SHAPE)
    for name, array in expected.items():
        np.testing.assert_allclose(found[f"variable/{name}"], array, rtol=1e-5, atol=1e-6, err_msg=name)


# How runs end. Programs without collectives need no torch, and start at once.

RANKED = "import os, signal, sys, time; rank = int(os.environ['RANK']); "
NOTED = RANKED + "open(os.path.join(os.environ['NOTES'], str(os.getpid())), 'w').close(); "


def left_over(folder):
    """Instances that wrote their process number to a folder and still run."""
    return [name for name in os.listdir(folder) if is_alive(name)]


FAILURES = {
    "an exit code": ("sys.exit('boom') if rank == 1 else time.sleep(90)", 1, r"[1] boom"),
    "silence": ("sys.exit(7) if rank == 1 else time.sleep(90)", 7, "ended with exit code 7. It said nothing."),
    "a kill": ("os.kill(os.getpid(), 9) if rank == 1 else time.sleep(90)", 137, "was killed by SIGKILL"),
    "a stop": ("os.kill(os.getpid(), signal.SIGSTOP) if rank == 1 else time.sleep(90)", 137, "was stopped"),
    "a deaf one": (
        "signal.signal(15, signal.SIG_IGN); sys.exit('boom') if rank == 0 else time.sleep(90)",
        1,
        "boom",
    ),
    "what follows from a kill": (
        "os.kill(os.getpid(), 9) if rank == 2 else (time.sleep(0.2), sys.exit('lost instance 2'))",
        137,
        "instance 2 (process ",
    ),
}


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
    code = "(time.sleep(6), print('so long', file=sys.stderr, flush=True), time.sleep(90)) if rank == 0 else "
    code += "(print('boom', file=sys.stderr, flush=True), time.sleep(7), sys.exit(3))"
    ended = launch(["--num-instances", 2], ["-c", RANKED + code])
    assert ended.code == 3
    *before, last = ended.said.splitlines()
    assert before == ["[1] boom", "so long"]
    assert re.match(r"poprun: instance 1 \(process \d+\) ended with exit code 3. What it said is above.", last)


@pytest.mark.parametrize("late", [0, 1])
def test_what_all_instances_say_when_they_fail_alike_is_said_once(late):
    code = f"print('error: a wrong value', file=sys.stderr, flush=True); rank == {late} and time.sleep(2); sys.exit(2)"
    ended = launch(["--num-instances", 3], ["-c", RANKED + code])
    assert (ended.code, ended.said) == (2, "error: a wrong value\n")


def test_instances_that_succeed_pass_on_what_they_say():
    ended = launch(["--num-instances", 2], ["-c", RANKED + "print('warning', rank, file=sys.stderr)"])
    assert ended.code == 0
    assert sorted(ended.said.splitlines()) == ["[1] warning 1", "warning 0"]


def wait_for_instances(folder, count):
    until = time.monotonic() + 30
    while len(os.listdir(folder)) < count and time.monotonic() < until:
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_reaches_instances_which_may_finish(number, tmp_path):
    handle = f"signal.signal({number:d}, lambda *_: (print('saved', rank, file=sys.stderr), sys.exit(0))); "
    process = start(["--num-instances", 2], ["-c", RANKED + handle + NOTED + "time.sleep(90)"], NOTES=str(tmp_path))
    begin = time.monotonic()
    wait_for_instances(tmp_path, 2)
    process.send_signal(number)
    ended = finish(process, begin)
    assert ended.code == 128 + number
    told, *saved = ended.said.splitlines()
    name = signal.Signals(number).name
    assert told == f"poprun: got {name}; instances have 60 s to finish (--grace). Once more ends them at once."
    assert sorted(saved) == ["[1] saved 1", "saved 0"]
    assert not left_over(tmp_path)


@pytest.mark.parametrize("grace, signals", [(0.5, 1), (60, 2), (60, 40)], ids=["in time", "at a second", "at many"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_instances_that_do_not_finish_after_a_signal_are_ended(number, grace, signals, tmp_path):
    deaf = f"signal.signal({number:d}, signal.SIG_IGN); "
    process = start(
        ["--num-instances", 2, "--grace", grace], ["-c", RANKED + deaf + NOTED + "time.sleep(90)"], NOTES=str(tmp_path)
    )
    begin = time.monotonic()
    wait_for_instances(tmp_path, 2)
    for _ in range(signals):
        process.send_signal(number)
        time.sleep(0.5 if signals == 2 else 0.02)
    ended = finish(process, begin)
    assert ended.code == 128 + number and ended.seconds < 30
    assert re.fullmatch("poprun: got .* Once more ends them at once.\n", ended.said)
    assert not left_over(tmp_path)


def test_a_run_that_ignores_hangups_goes_on_after_one(tmp_path):
    """.. as under nohup."""
    code = "signal.signal(signal.SIGHUP, signal.SIG_IGN); from popdist import launcher; sys.exit(launcher.main())"
    words = ["-c", "import signal, sys; " + code, "--num-instances", "1", sys.executable, "-c", NOTED + "time.sleep(3)"]
    process = subprocess.Popen([sys.executable, *words], env=environment(NOTES=str(tmp_path)))
    wait_for_instances(tmp_path, 1)
    time.sleep(1)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 0


LATE = {
    "starting": "time.sleep(90)",
    "opening connections": "import torch.distributed as d; d.init_process_group = lambda *_, **__: time.sleep(90); "
    "popdist.init()",
}


@pytest.mark.parametrize("place", LATE)
def test_ctrl_c_ends_instances_that_wait_for_one_that_is_still(place, tmp_path):
    code = f"popdist.init() if rank == 0 else exec({LATE[place]!r})"
    process = start(["--num-instances", 2], ["-c", "import popdist; " + NOTED + code], NOTES=str(tmp_path))
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
    process = start(["--num-instances", 2], ["-c", NOTED + STARTS_ANOTHER, sleep], NOTES=str(tmp_path))
    begin = time.monotonic()
    wait_for_instances(tmp_path, 4)
    process.kill()
    assert finish(process, begin).code == -signal.SIGKILL
    until = time.monotonic() + 10
    while left_over(tmp_path) and time.monotonic() < until:
        time.sleep(0.02)
    assert not left_over(tmp_path)


IMPATIENT = "import sys, popdist.exchange; popdist.exchange.JOIN_SECONDS = 1; from popdist import launcher; "


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def two_machines(index):
    return f"--num-instances 2 --nnodes 2 --node-rank {index} --rdzv-endpoint 127.0.0.1:{free_port()} true".split()


def start_two_machines(program, port, instances, options=(), **more):
    """The launchers of a run on two machines, which both are this one."""
    options = ["--num-instances", instances, "--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{port}", *options]
    return [start([*options, "--node-rank", index], program, **more) for index in range(2)]


@pytest.mark.parametrize("index", [0, 1])
def test_a_machine_that_does_not_meet_the_others_in_time_says_so_in_one_message(index):
    command = [sys.executable, "-c", IMPATIENT + "sys.exit(launcher.main(sys.argv[1:]))", *two_machines(index)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == 1
    assert re.fullmatch(f"poprun: machine {index} of 2 did not meet the others at 127.0.0.1:.*; .*\n", done.stderr)


LISTENS = {
    "a machine": (
        "sys.exit(launcher.main(sys.argv[1:]))",
        r"poprun: machine 1 .* \(what listens there says nothing\);",
    ),
    "an instance": ("import popdist; popdist.init()", r"popdist: got no answer from 127.0.0.1:\d+ within 1 s,"),
}


@pytest.mark.parametrize("who", LISTENS)
def test_a_port_where_something_else_listens_and_says_nothing_is_told_of(who):
    code, says = LISTENS[who]
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = str(silent.getsockname()[1])
        options = f"--num-instances 2 --nnodes 2 --node-rank 1 --rdzv-endpoint 127.0.0.1:{port} true".split()
        of_instance = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables = environment(POPDIST_TIMEOUT="1", **(of_instance if who == "an instance" else {}))
        command = [sys.executable, "-c", IMPATIENT + code, *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables)
    assert done.returncode == 1
    assert re.fullmatch(says + ".*\n", done.stderr)


@pytest.mark.parametrize("index", [0, 1])
def test_waiting_for_other_machines_ends_with_ctrl_c(index):
    code = "import threading, os, signal; from popdist import launcher; import sys; import popxl_engine.agent; "
    code += "threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start(); launcher.main(sys.argv[1:])"
    command = [sys.executable, "-c", code, *two_machines(index)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


COLLECTIVE = """
import os, sys, time
import numpy as np
import popxl, popdist
from popxl.ops.collectives import replicated_all_reduce_
mode, rank = sys.argv[1], popdist.getInstanceIndex()
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


@pytest.mark.parametrize(
    "mode, says",
    [
        ("exception", "[1] [rank1]: ValueError: bad luck"),
        ("hang", "replica 0 waits at %replicated_all_reduce_"),
        ("program", "instance 0 has '%w: float32[4] = variable', instance 1 has '%w: float32[5] = variable'"),
    ],
)
def test_errors_around_collectives_name_their_cause(mode, says):
    ended = launch(["--num-instances", 2, "--timeout", 3], ["-c", COLLECTIVE, mode])
    assert ended.code == 1
    assert says in ended.last_line
    assert ended.said.count("Traceback") == 1
    if mode == "hang":
        assert re.search(HANGS, ended.last_line)


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
    ended = launch(["--num-instances", 3, "--timeout", 3 if how == "at once" else 60], ["-c", APART, how])
    assert ended.code == 1 and ended.seconds < 40
    assert "Instance 2 waits, too: gathering values. Instance 1" in ended.last_line
    assert re.search(HANGS, ended.last_line)


def test_instances_that_no_launcher_started_end_one_after_another_without_a_word():
    code = "import time, popdist; popdist.init(); time.sleep(4 * popdist.getInstanceIndex())"
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=environment(**shared, RANK=rank), stderr=subprocess.PIPE)
        for rank in ("0", "1")
    ]
    said = [process.communicate(timeout=SECONDS)[1] for process in started]
    assert [(process.returncode, text) for process, text in zip(started, said)] == [(0, b"")] * 2


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
        ("--num-replicas 5 --num-instances 2 true", "got 5 for 2 instances; expected a multiple of the instances. Use"),
        ("--num-instances 3 --nnodes 2 --rdzv-endpoint a:1 true", "got 3 on 2 machines"),
        ("--num-instances 2 --nnodes 2 true", "without the first one's address"),
        ("--num-instances 2 --nnodes 2 --node-rank 2 true", "--node-rank: got 2; expected 0 to 1"),
        ("--rdzv-endpoint host true", "--rdzv-endpoint: got 'host'; expected HOST:PORT"),
        ("--master-port 70000 true", "--master-port: got 70000"),
    ],
)
def test_command_lines_that_cannot_run_are_refused_in_one_sentence(command, says, capsys):
    assert launcher.main(command.split()) == 2
    said = capsys.readouterr().err
    assert says in said and len(said.splitlines()) == 1


def threads_of_each(instances):
    options = launcher.parser().parse_args(["--num-instances", str(instances), "true"])
    launcher.check(options)
    return launcher.environment(options).get("OMP_NUM_THREADS")


def test_threads_are_divided_evenly_unless_the_user_says_how_many(monkeypatch):
    monkeypatch.setattr(launcher, "_cores", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert (threads_of_each(3), threads_of_each(32)) == ("5", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads_of_each(3) is None


def test_instances_talk_by_the_interface_of_the_first_machines_address():
    assert launcher.interface_towards("127.0.0.1") == launcher.interface_towards("localhost") == "lo"
    assert launcher.interface_towards("no-such-host.invalid") is None


def test_an_interface_that_is_not_there_is_refused_at_once():
    ended = launch(["--num-instances", 2], ["-c", "import popdist; popdist.init()"], GLOO_SOCKET_IFNAME="lo,eth77")
    assert ended.code == 1
    says = "environment variable GLOO_SOCKET_IFNAME: got 'eth77'; expected a network interface of this machine, of "
    assert says in ended.last_line and ended.seconds < 30


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
    machines = [start([*common, *n, "--node-rank", i], ["-c", "print('ran')"]) for i, n in enumerate(numbers)]
    ended = [finish(machine, begin) for machine in machines]
    each = [f"--num-replicas {n} --num-instances {n} --nnodes 2 on machine {i}" for i, n in enumerate((4, 2))]
    assert [(e.code, e.said) for e in ended] == [
        (2, f"poprun: got {ours} and {theirs}; expected the same on all. Change one of them.\n")
        for ours, theirs in (each, reversed(each))
    ]
    assert all(e.seconds < 40 for e in ended)


ENDS_ELSEWHERE = {
    "fails after that of machine 0 has succeeded": (1, "sys.exit() if rank == 0 else (time.sleep(3), sys.exit(5))", 5),
    "fails while that of machine 1 talks to nobody": (0, "sys.exit(5) if rank == 0 else time.sleep(90)", 5),
    "is killed": (1, "time.sleep(90) if rank == 0 else os.kill(os.getpid(), 9)", 137),
}


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
    happened = rf"instance {failing} \(process \d+\) (ended with exit code 5|was killed by SIGKILL)\."
    assert re.match(f"poprun: {happened}", ended[failing].last_line)
    assert re.fullmatch(f"poprun: machine {failing}: {happened} What runs here was ended.\n", ended[1 - failing].said)


def test_a_launcher_that_is_killed_on_the_first_machine_ends_the_other(tmp_path):
    begin = time.monotonic()
    machines = start_two_machines(["-c", NOTED + "time.sleep(90)"], free_port(), 2, NOTES=str(tmp_path))
    wait_for_instances(tmp_path, 2)
    machines[0].kill()
    ended = [finish(machine, begin) for machine in machines]
    assert (ended[1].code, ended[1].said) == (1, "poprun: machine 0: its poprun is gone. What runs here was ended.\n")
    assert ended[1].seconds < 40
    assert not left_over(tmp_path)
