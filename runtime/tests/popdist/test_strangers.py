"""Outsiders at the doors of a run: other users of the machine, and whoever reaches its ports."""

import contextlib
import os
import pickle
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from helpers.processes import RANKED, SECONDS, environment, finish, free_port, launch, start
from poprun import private, rendezvous, store, wire
from poprun.deadline import Deadline

from tests import warm

SECRET = b"known to members only"
OTHER = 65534
"""The user number of nobody."""
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can play another user")


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture
def keeper(monkeypatch):
    """The address of a store between machines, which is kept here."""
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 2.0)  # tests wait for its end
    listener = wire.listen(("127.0.0.1", 0))
    kept = store.Keeper(listener, SECRET)
    yield listener.getsockname()
    kept.close()


def member(address, secret=SECRET, seconds=5.0):
    return store.connect(address, secret, Deadline(seconds))


def check_open(address):
    """A member gets in at once, and is answered."""
    begin = time.monotonic()
    client = member(address)
    client.set("key", "value")
    assert client.get("key") == b"value"
    client.close()
    assert time.monotonic() - begin < 2


def says_nothing_more(connection):
    """Whether the other end closes the connection without a word."""
    connection.settimeout(wire.HANDSHAKE_SECONDS + 3)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.slow
def test_members_see_each_others_values(keeper):
    first, second = member(keeper), member(keeper)
    with pytest.raises(store.StoreError, match=r"timed out after 0.1 s waiting for a"):
        first.get("a", Deadline(0.1))
    threading.Timer(0.1, second.set, ("a", b"\0\xff")).start()
    assert first.get("a", Deadline(5)) == b"\0\xff" and first.has("a") and not first.has("b")
    assert [first.add("n", 2), second.add("n", -5)] == [2, -3]
    assert first.replace("a", b"no", b"new") == b"\0\xff"
    assert second.replace("a", b"\0\xff", b"new") == b"new" == first.get("a")
    assert first.replace("c", b"", b"first") == first.replace("c", b"", b"second") == b"first"
    assert first.count() == 3 and second.delete("a") and not second.delete("a")
    for client in (first, second):
        client.close()


@pytest.mark.slow
def test_a_value_that_is_too_large_is_refused_by_both_ends(keeper):
    client = member(keeper)
    with pytest.raises(store.StoreError, match="expected at most 16777216"):
        client.set("key", bytes(store.VALUE_BYTES + 1))
    client._connection.sendall(store.REQUEST.pack(store.SET, 1, 2**32 - 1, 0))
    with pytest.raises(store.StoreError):
        client.get("key")
    client.close()
    check_open(keeper)


def garbage(path):
    return [
        pickle.dumps(Bomb(path)) * 50,
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        b"\0" * 100_000,
        wire.MAGIC,
        wire.MAGIC + b"n" * wire.NONCE + pickle.dumps(Bomb(path)) * 50,
        b"x" + (wire.MAGIC + b"n" * wire.NONCE)[1:],
        store.REQUEST.pack(store.SET, 3, 3, 0.0) + b"keyval",
    ]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("number", range(7))
def test_garbage_is_neither_read_further_nor_answered(keeper, tmp_path, number):
    text = garbage(tmp_path / "mark")[number]
    with socket.create_connection(keeper) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(text)
        if text.startswith(wire.MAGIC) and len(text) > len(wire.MAGIC):
            with contextlib.suppress(ConnectionResetError):
                # its challenge, and its own proof
                assert len(wire.receive_exactly(stranger, 2 * wire.NONCE)) == 64
        check_open(keeper)
        stranger.settimeout(10)
        assert says_nothing_more(stranger)
    assert not (tmp_path / "mark").exists()


@pytest.mark.slow
def test_a_thousand_silent_connections_keep_no_member_waiting_and_no_descriptor(keeper):
    before = len(os.listdir("/proc/self/fd"))
    strangers = []
    for number in range(1000):
        strangers.append(socket.create_connection(keeper))
        if number % 250 == 0:
            check_open(keeper)
    check_open(keeper)
    assert len(os.listdir("/proc/self/fd")) - before <= 1000 + wire.STRANGERS + 8
    assert says_nothing_more(strangers[-1])  # none may stay for long
    for stranger in strangers:
        stranger.close()
    check_open(keeper)
    assert len(os.listdir("/proc/self/fd")) - before <= wire.STRANGERS + 8


class Recorder(threading.Thread):
    """Stands between a member and the store, and keeps what the member says."""

    def __init__(self, address):
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address, self.said = address, b""

    def run(self):
        near, _ = self.listener.accept()
        with near, socket.create_connection(self.address) as far:
            back = threading.Thread(target=self.pass_back, args=(far, near))
            back.start()
            while text := near.recv(2**16):
                self.said += text
                far.sendall(text)
            far.shutdown(socket.SHUT_WR)
            back.join()

    def pass_back(self, far, near):
        with contextlib.suppress(OSError):
            while text := far.recv(2**16):
                near.sendall(text)


@pytest.mark.slow
def test_what_a_member_has_said_lets_nobody_else_in(keeper):
    recorder = Recorder(keeper)
    recorder.start()
    client = member(recorder.listener.getsockname())
    client.add("count", 1)
    client.close()
    recorder.join(10)
    recorder.listener.close()
    with socket.create_connection(keeper) as stranger:
        stranger.sendall(recorder.said)
        with contextlib.suppress(ConnectionResetError):
            wire.receive_exactly(stranger, 2 * wire.NONCE)
        assert says_nothing_more(stranger)
    client = member(keeper)
    assert client.add("count", 0) == 1
    client.close()


def listens(answer):
    """The address of something that answers what it is told by a function of it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        with contextlib.suppress(OSError):
            while True:
                visitor, _ = listener.accept()
                with visitor:
                    if told := answer(visitor.recv(100)):
                        visitor.sendall(told)
                        visitor.recv(100)

    threading.Thread(target=serve, daemon=True).start()
    return listener


LISTENERS = {
    "random bytes": lambda said: os.urandom(64),
    "what it was told": lambda said: (said * 2)[len(wire.MAGIC) :][: 2 * wire.NONCE],
    "the proof of another secret": lambda said: (
        bytes(32)
        + wire._proof(b"another secret, not ours", b"listens", said[len(wire.MAGIC) :], bytes(32))
    ),
}


@pytest.mark.parametrize("what", LISTENERS)
def test_a_listener_that_does_not_know_the_secret_is_told_nothing(what):
    with (
        listens(LISTENERS[what]) as listener,
        pytest.raises(wire.Stranger, match="does not know this run's secret"),
    ):
        member(listener.getsockname())


@pytest.mark.slow
def test_a_listener_that_ends_connections_is_one_that_cannot_be_reached():
    with (
        listens(lambda said: b"") as listener,
        pytest.raises(wire.Unreachable, match="ended the connection"),
    ):
        member(listener.getsockname(), seconds=0.2)
    with pytest.raises(wire.Unreachable, match="Connection refused"):
        member(("127.0.0.1", free_port()), seconds=0.2)


# On one machine

AS_OTHER = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for path in sys.argv[1:]:
    with socket.socket(socket.AF_UNIX) as stranger:
        try:
            stranger.connect(path)
            stranger.settimeout(5)
            print("closed" if not stranger.recv(1) else "answered")
        except OSError as error:
            print(type(error).__name__)
"""


def as_other(*paths):
    """What becomes of another user's connections."""
    command = [sys.executable, "-I", "-S", "-c", AS_OTHER, *map(str, paths)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()


@pytest.mark.slow
@needs_root
def test_another_user_who_gets_into_the_folder_is_not_let_in():
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        place = Path(name)
        kept = store.Keeper(wire.listen(place / "store"), None)
        place.chmod(0o777)
        (place / "store").chmod(0o777)
        assert as_other(place / "store") == ["closed"]
        client = store.connect(place / "store", None, Deadline(5))
        client.set("key", "value")
        client.close()
        kept.close()


@pytest.mark.slow
def test_a_socket_in_a_folder_with_a_long_name_can_be_met_at(tmp_path):
    place = tmp_path / ("x" * 120)
    place.mkdir()
    kept = store.Keeper(wire.listen(place / "store"), None)
    client = store.connect(place / "store", None, Deadline(5))
    client.set("key", "value")
    client.close()
    kept.close()


STAYS = (
    RANKED + "import popdist; popdist.init(); from popxl.extensions import gather; gather(rank); "
)
STAYS += "open(os.path.join(os.environ['NOTES'], f'{os.getpid()}'), 'w').close(); "
STAYS += "os.write(1, (str(os.environ.get('POPDIST_RENDEZVOUS')) + '\\n').encode())\n"  # at once
STAYS += "while not os.path.exists(os.environ['NOTES'] + '/end'): time.sleep(0.05)\n"
STAYS += "sys.exit(gather(rank) != list(range(int(os.environ['WORLD_SIZE']))))"
"""A run that has met, stays, and talks once more at its end."""


def wait_for(folder, count):
    until = time.monotonic() + 60
    while len(os.listdir(folder)) < count and time.monotonic() < until:
        time.sleep(0.02)
    assert len(os.listdir(folder)) == count


def ports_of(pids):
    """TCP ports at which processes of this machine listen, with their addresses."""
    found = set()
    for pid in pids:
        inodes = set()
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        for kind in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == "0A" and f"socket:[{rest[5]}]" in inodes:
                    address, port = local.split(":")
                    found.add((address, int(port, 16)))
    return found


@pytest.mark.multi
def test_a_run_on_one_machine_listens_at_no_port_and_no_other_user_can_enter_its_folder(tmp_path):
    begin = time.monotonic()
    process = start(["--num-instances", 2], ["-c", STAYS], is_fork=False, NOTES=str(tmp_path))
    try:
        wait_for(tmp_path, 2)
        folder = Path(process.stdout.readline().strip())
        assert (
            folder.stat().st_mode & 0o777 == 0o700 and folder.parent.stat().st_mode & 0o777 == 0o700
        )
        assert ports_of([process.pid, *os.listdir(tmp_path)]) == set()
        sockets = [path for path in folder.iterdir() if path.is_socket()]
        assert {path.name for path in sockets} == {"store", "0", "1"}
        if os.getuid() == 0:
            assert as_other(*sockets) == ["PermissionError"] * 3
    finally:
        (tmp_path / "end").touch()
    assert finish(process, begin).code == 0
    assert not folder.exists()


@pytest.mark.multi
def test_instances_that_no_launcher_started_listen_at_no_port_either(tmp_path):
    shared = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "NOTES": str(tmp_path),
    }
    started = [
        subprocess.Popen([sys.executable, "-c", STAYS], env=environment(**shared, RANK=r))
        for r in "01"
    ]
    try:
        wait_for(tmp_path, 2)
        assert ports_of(process.pid for process in started) == set()
    finally:
        (tmp_path / "end").touch()
    assert [process.wait(timeout=SECONDS) for process in started] == [0, 0]


@pytest.mark.multi
def test_a_second_run_with_one_address_is_refused_in_words(tmp_path):
    shared = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "NOTES": str(tmp_path),
    }
    started = [
        subprocess.Popen([sys.executable, "-c", STAYS], env=environment(**shared, RANK=r))
        for r in "01"
    ]
    try:
        wait_for(tmp_path, 2)
        command = [sys.executable, "-c", "import popdist; popdist.init()"]
        second = subprocess.run(
            command, env=environment(**shared, RANK="0"), capture_output=True, text=True
        )
    finally:
        (tmp_path / "end").touch()
    assert "which is in use; expected a free port" in second.stderr.splitlines()[-1]
    assert [process.wait(timeout=SECONDS) for process in started] == [0, 0]


@pytest.mark.slow
@needs_root
def test_a_folder_that_another_user_has_made_first_is_refused_in_words_and_poprun_takes_another(
    tmp_path,
):
    tmp_path.chmod(0o1777)
    planted = tmp_path / f"popdist-{os.getuid()}"
    planted.mkdir()
    os.chown(planted, OTHER, OTHER)
    shared = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TMPDIR": str(tmp_path),
    }
    command = [sys.executable, "-c", "import popdist; popdist.init()"]
    done = subprocess.run(command, env=environment(**shared), capture_output=True, text=True)
    says = (
        f"RendezvousError: popdist: the instances cannot meet ({planted} belongs to another user)."
    )
    assert done.stderr.splitlines()[-1].endswith(says)
    ended = launch(
        ["--num-instances", 2], ["-c", "import popdist; popdist.init()"], TMPDIR=str(tmp_path)
    )
    assert (ended.code, ended.said) == (0, "") and not list(planted.iterdir())


def test_folders_of_runs_that_were_killed_are_removed_by_the_next_and_others_stay(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(rendezvous.tempfile, "tempdir", str(tmp_path))
    base = tmp_path / f"popdist-{os.getuid()}"
    with rendezvous.new_folder() as first:
        (base / "killed").mkdir()
        (base / "killed" / "store").touch()
        with rendezvous.new_folder() as second:
            assert set(base.iterdir()) == {first, second}
        assert set(base.iterdir()) == {first}
    assert not list(base.iterdir())


# On several machines


def two_machines(program, port, secrets=(SECRET, SECRET), **more):
    options = ["--num-instances", 2, "--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{port}"]
    return [
        start([*options, "--node-rank", index], program, POPDIST_SECRET=secret.decode(), **more)
        for index, secret in enumerate(secrets)
    ]


@pytest.mark.multi
def test_strangers_at_every_port_of_a_run_neither_end_nor_change_it(tmp_path):
    notes, mark = tmp_path / "notes", tmp_path / "mark"
    notes.mkdir()
    begin = time.monotonic()
    machines = two_machines(["-c", STAYS], free_port(), is_fork=False, NOTES=str(notes))
    try:
        # Those that open and those that stay: while instances meet, and while they run.
        met = threading.Thread(target=wait_for, args=(notes, 2))
        met.start()
        pids = [machine.pid for machine in machines]
        attacked, strangers = set(), []
        while met.is_alive():
            for place in ports_of(pids):
                attacked.add(place)
                with contextlib.suppress(OSError):
                    strangers.append(socket.create_connection(("127.0.0.1", place[1]), 1))
                    if len(strangers) % 2:
                        strangers[-1].sendall(garbage(mark)[len(strangers) % 7])
            time.sleep(0.01)
        assert len(notes_of := os.listdir(notes)) == 2
        open_ports = ports_of([*pids, *notes_of])
        assert {address for address, _ in open_ports | attacked} == {"0100007F"}  # 127.0.0.1
        assert len(open_ports) == 1  # the store: instances listen until all have come
        for _ in range(100):
            strangers.append(socket.create_connection(("127.0.0.1", next(iter(open_ports))[1]), 5))
        for text in garbage(mark):
            with socket.create_connection(("127.0.0.1", next(iter(open_ports))[1])) as stranger:
                with contextlib.suppress(OSError):
                    stranger.sendall(text)
        time.sleep(1.5)
    finally:
        (notes / "end").touch()
    ended = [finish(machine, begin) for machine in machines]
    assert [(e.code, e.said) for e in ended] == [(0, ""), (0, "")]
    assert attacked and not mark.exists()
    for stranger in strangers:
        stranger.close()


@pytest.mark.multi
def test_machines_with_different_secrets_do_not_meet_and_say_how_they_can():
    begin = time.monotonic()
    impatient = "import sys, poprun.rendezvous; poprun.rendezvous.JOIN_SECONDS = 3; from poprun import launcher; "
    impatient += "sys.exit(launcher.main(sys.argv[1:]))"
    port, machines = free_port(), []
    for index, secret in enumerate((SECRET, b"another one, not ours")):
        options = (
            f"--num-instances 2 --nnodes 2 --rdzv-endpoint 127.0.0.1:{port} --node-rank {index} "
            "true"
        ).split()
        variables = environment(POPDIST_SECRET=secret.decode())
        command = [sys.executable, "-c", impatient, *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        machines.append(subprocess.Popen(command, env=variables, **pipes))
    ended = [finish(machine, begin) for machine in machines]
    assert [e.code for e in ended] == [1, 1]
    assert "machine 0 of 2 did not meet the others" in ended[0].said
    assert "what listens there does not know this run's secret" in ended[1].said
    assert "POPDIST_SECRET" in ended[1].said
    assert all(len(e.said.splitlines()) == 1 and SECRET.decode() not in e.said for e in ended)


@pytest.fixture
def no_secret(tmp_path, monkeypatch):
    """A user who has none yet. Returns where it will be."""
    for name in (rendezvous.SECRET, rendezvous.SECRET_FILE, rendezvous.HEX, rendezvous.TRUST):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "popdist" / "secret"


def test_the_first_run_makes_a_secret_that_the_next_one_finds(no_secret):
    before = os.umask(0)
    try:
        found = rendezvous.find_secret()
    finally:
        os.umask(before)
    assert len(found) == 64 and found == rendezvous.find_secret() == no_secret.read_bytes().strip()
    assert [path.stat().st_mode & 0o777 for path in (no_secret, no_secret.parent)] == [0o600, 0o700]
    assert list(no_secret.parent.iterdir()) == [no_secret]


def test_processes_that_make_a_secret_at_once_agree_on_one(no_secret):
    program = "from poprun import rendezvous; print(rendezvous.find_secret())"
    started = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(4)
    ]
    assert len({process.communicate(timeout=60)[0] for process in started}) == 1


def loosen(path):
    path.chmod(0o644)


def give(path):
    os.chown(path, OTHER, OTHER)


def make_pipe(path):
    path.unlink()
    os.mkfifo(path, 0o600)


def let_others_in(path):
    path.parent.chmod(0o770)


@pytest.mark.parametrize(
    "change, says",
    [
        (loosen, "other users may read .*secret; chmod 600"),
        pytest.param(give, "secret belongs to another user", marks=needs_root),
        (make_pipe, "is not a plain file"),
        (let_others_in, "other users may write to"),
    ],
)
def test_a_secret_that_others_can_know_or_have_made_is_refused(no_secret, change, says):
    rendezvous.find_secret()
    change(no_secret)
    with pytest.raises(private.NotPrivate, match=says):
        rendezvous.find_secret()


def test_secrets_from_the_environment_are_neither_short_nor_missing(
    no_secret, monkeypatch, tmp_path
):
    monkeypatch.setenv(rendezvous.SECRET_FILE, str(tmp_path / "none"))
    with pytest.raises(
        rendezvous.RendezvousError,
        match="POPDIST_SECRET_FILE: got .*, which is not there; expected a file",
    ):
        rendezvous.find_secret()
    monkeypatch.setenv(rendezvous.SECRET, "x" * 15)
    with pytest.raises(
        rendezvous.RendezvousError,
        match="POPDIST_SECRET: got 15 bytes; expected a secret of 16 to 4096",
    ):
        rendezvous.find_secret()
    monkeypatch.setenv(rendezvous.TRUST, "1")
    assert rendezvous.find_secret() == b""


@pytest.mark.multi
def test_a_secret_of_any_bytes_in_a_file_lets_machines_meet(no_secret):
    rendezvous.find_secret()
    no_secret.write_bytes(bytes(range(255, -1, -1)))
    program = ["-c", "import popdist; popdist.init()"]
    variables = environment(POPDIST_SECRET_FILE=str(no_secret))
    del variables["POPDIST_SECRET"]
    options = f"--num-instances 2 --nnodes 2 --rdzv-endpoint 127.0.0.1:{free_port()} --node-rank"
    begin, pipes = time.monotonic(), {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    machines = [
        subprocess.Popen(
            [
                *(warm.launcher(), "-m", "poprun", *options.split(), str(index)),
                *(sys.executable, *program),
            ],
            env=variables,
            text=True,
            **pipes,
        )
        for index in range(2)
    ]
    ended = [finish(machine, begin) for machine in machines]
    assert [(e.code, e.said) for e in ended] == [(0, ""), (0, "")]


def test_a_secret_in_the_environment_may_have_bytes_that_are_no_text(no_secret, monkeypatch):
    secret = bytes(range(255, 0, -1))
    monkeypatch.setenv(rendezvous.HEX, secret.hex())
    assert rendezvous.find_secret() == secret
    monkeypatch.setitem(os.environb, rendezvous.SECRET.encode(), secret[::2])
    assert rendezvous.find_secret() == secret[::2]
    monkeypatch.delenv(rendezvous.SECRET)
    monkeypatch.setenv(rendezvous.HEX, "no number")
    with pytest.raises(rendezvous.RendezvousError, match="POPDIST_SECRET_HEX: got what is no hex"):
        rendezvous.find_secret()


@pytest.mark.slow
def test_nothing_in_the_repository_unpickles_or_evaluates():
    root = Path(__file__).parents[3]
    words = r"pickle\.|import pickle|gather_object|object_list\(|torch\.load\(|\beval\(|(unsafe|full)_load|marshal|shelve"
    pattern = re.compile(words)
    found = []
    for path in root.rglob("*.py"):
        inside = path.relative_to(root).parts
        if inside[0].startswith(".") or "tests" in inside or inside[0] == "benchmarks":
            continue
        found += [
            f"{path}: {line}" for line in path.read_text().splitlines() if pattern.search(line)
        ]
    safe = re.compile(r"allow_pickle=False|torch\.load\(.* weights_only=True")
    assert [line for line in found if not safe.search(line)] == []
