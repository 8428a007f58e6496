"""Two machines, two processes on each: training runs, a cut link ends it everywhere, and it goes on
bitwise.

The machines are network namespaces joined by a cable; where those are not permitted, two process
groups on this machine's own address, and the cut is the sudden death of one.
"""

import ctypes
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests import warm
from tests.integration.runs import run_job
from tests.metrics_text import metrics_of

pytestmark = [pytest.mark.multi, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "demo" / "pretraining.py"
TIMEOUT = 10
"""Seconds that a collective waits."""
SECONDS = 120
FLAGS = "--config tiny --steps 5 --checkpoint.every 1 --checkpoint.keep 100 --checkpoint.load auto".split()


def environment():
    given = ("RANK", "WORLD_SIZE", "POPDIST_", "GLOO_")
    plain = {key: value for key, value in os.environ.items() if not key.startswith(given)}
    return {**plain, "OMP_NUM_THREADS": "1", "POPDIST_SECRET": "that of these tests"}


CLONE_NEWNET = 0x40000000
PACKAGES = (*warm.PACKAGES, *warm.OF_LAUNCHER)
"""What the launchers and instances of one machine find imported: they have one warm Python."""


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


class Namespaces:
    """Two hosts of their own, 10.98.7.1 and .2, with one cable."""

    address = "10.98.7.1"
    port = 29500

    def __init__(self):
        self.names = [f"popxl{os.getpid()}{side}" for side in "ab"]
        for name in self.names:
            ip("netns", "add", name)
        first, second = (["cable", "netns", name] for name in self.names)
        ip("link", "add", *first, "type", "veth", "peer", "name", *second)
        self.pythons = [warm.python(PACKAGES, before=entering(name)) for name in self.names]
        for number, name in enumerate(self.names, start=1):
            ip("-n", name, "addr", "add", f"10.98.7.{number}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")

    def cut(self, launchers):
        ip("-n", self.names[0], "link", "set", "cable", "down")

    def mend(self):
        ip("-n", self.names[0], "link", "set", "cable", "up")

    def close(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def entering(name):
    """Puts a process into a network namespace."""

    def enter():
        file = os.open(f"/run/netns/{name}", os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(file, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")
        os.close(file)

    return enter


class Groups:
    """Two process groups on the loopback address."""

    address = "127.0.0.1"

    def __init__(self):
        with socket.socket() as probe:
            probe.bind((self.address, 0))
            self.port = probe.getsockname()[1]
        self.pythons = [warm.python(PACKAGES)] * 2

    def cut(self, launchers):
        launchers[1].send_signal(signal.SIGKILL)

    def mend(self):
        pass

    def close(self):
        pass


PIPES = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}


@pytest.fixture
def machines():
    try:
        found = Namespaces()
    except (OSError, subprocess.CalledProcessError):
        found = Groups()
    yield found
    found.close()


def start(machines, folder):
    launcher = [
        "-m",
        "poprun",
        "--num-replicas",
        8,
        "--num-instances",
        4,
        "--nnodes",
        2,
    ]
    address = ["--rdzv-endpoint", f"{machines.address}:{machines.port}", "--timeout", TIMEOUT]
    started = []
    for number, python in enumerate(machines.pythons):
        program = [python, SCRIPT, *FLAGS, "--run_folder", folder]
        words = [python, *launcher, "--node-rank", number, *address, *program]
        started.append(subprocess.Popen([*map(str, words)], env=environment(), **PIPES))
    return started


def tensors(folder):
    checkpoint = folder / "tiny" / "checkpoints" / "step_00000005"
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}


def test_a_cut_link_ends_the_run_on_both_machines_and_it_goes_on_bitwise(machines, tmp_path):
    launchers = start(machines, tmp_path / "two")
    try:
        until = time.monotonic() + SECONDS
        while (
            not (tmp_path / "two/tiny/checkpoints/step_00000002").exists()
            and time.monotonic() < until
        ):
            assert launchers[0].poll() is None, launchers[0].communicate()[1]
            time.sleep(0.02)
        machines.cut(launchers)
        cut = time.monotonic()
        said = [launcher.communicate(timeout=SECONDS)[1] for launcher in launchers]
        assert time.monotonic() - cut < TIMEOUT + 30
        assert all(launcher.returncode != 0 for launcher in launchers)
        assert "popdist: instance" in said[0].strip().splitlines()[-1]
        machines.mend()
        launchers = start(machines, tmp_path / "two")
        said = [launcher.communicate(timeout=SECONDS)[1] for launcher in launchers]
        assert [launcher.returncode for launcher in launchers] == [0, 0], said
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
    run_job(*FLAGS, "--run_folder", tmp_path / "one")
    metrics = [metrics_of(tmp_path / name / "tiny") for name in ("one", "two")]
    assert metrics[0] == metrics[1]
    assert tensors(tmp_path / "one") == tensors(tmp_path / "two") != {}
