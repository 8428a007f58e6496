"""How tests start several processes: bounded in time, on this machine only, each with one
thread.
"""

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests import warm

TESTS = Path(__file__).parents[1]
LAUNCHER = "poprun"
SECONDS = 100
"""Seconds beyond which a launch has failed."""


@dataclass(frozen=True)
class Ended:
    """A launch that is over."""

    code: int
    said: str
    """What it said on stderr."""
    seconds: float

    @property
    def last_line(self):
        return self.said.strip().splitlines()[-1]


def environment(**more):
    """The environment without what a launcher would set, in which programs find `helpers` and are
    verified after every pass.
    """
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "POPDIST_", "POPXL_", "GROUP_RANK")
    plain = {key: value for key, value in os.environ.items() if not key.startswith(launcher)}
    paths = (str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")]))
    return {
        **plain,
        "POPXL_VERIFY": os.environ["POPXL_VERIFY"],
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "POPDIST_SECRET": "that of these tests",
        **more,
    }


def start(options, program, module=LAUNCHER, python=sys.executable, is_fork=True, **more):
    """A launcher that has been started. ``program``: arguments of Python.

    ``python``: what runs the instances of our launcher. ``is_fork``: that launcher has torch loaded
    already, and the process that is returned passes signals to it.
    """
    is_ours = module == LAUNCHER
    launcher = warm.launcher() if is_ours and is_fork else sys.executable
    interpreter = [python] if is_ours else []
    command = [launcher, "-m", module, *map(str, options), *interpreter, *map(str, program)]
    return subprocess.Popen(
        command, env=environment(**more), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def finish(process, begin):
    """Wait for it, and end it where it takes too long."""
    try:
        _, said = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.communicate(timeout=30)
        raise
    return Ended(process.returncode, said, time.monotonic() - begin)


def launch(options, program, module=LAUNCHER, **more):
    """Start it and wait."""
    begin = time.monotonic()
    return finish(start(options, program, module, **more), begin)


def is_alive(pid):
    """Whether a process runs (one that has ended and was not waited for does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


RANKED = "import os, signal, sys, time; rank = int(os.environ['RANK']); "
"""The begin of a program that asks for its rank."""
NOTED = RANKED + "open(os.path.join(os.environ['NOTES'], str(os.getpid())), 'w').close(); "
"""And leaves its process number in a folder."""


def left_over(folder):
    """Instances that wrote their process number to a folder and still run."""
    return [name for name in os.listdir(folder) if is_alive(name)]


def wait_for_instances(folder, count):
    """.. to leave their process numbers in a folder."""
    until = time.monotonic() + 30
    while len(os.listdir(folder)) < count and time.monotonic() < until:
        time.sleep(0.02)


def free_port():
    """One that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
