"""What asks a run to save does not end it while it starts."""

import subprocess
import sys

import pytest
from helpers.processes import RANKED, SECONDS, TESTS, environment, launch
from poprun import die_with_parent

ASKED = """
import importlib, os, pathlib, pkgutil, runpy, signal, sys

FREE = {free}

class Asked:
    @staticmethod
    def find_spec(name, *_):
        if name not in FREE:
            os.kill(os.getpid(), signal.SIGUSR1)

sys.meta_path.insert(0, Asked)
sys.argv = {words}
runpy.{run}(sys.argv[0], run_name="__main__")
"""
"""Asks a program to save when it imports anything but some modules."""


def asked(run: str, words: "list[str]", *free: str) -> subprocess.CompletedProcess:
    script = ASKED.format(free=set(free), words=words, run=run)
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment(),
    )


def test_a_launcher_that_is_asked_to_save_while_it_loads_goes_on():
    done = asked("run_module", ["poprun", "--help"], "poprun", "poprun.__main__")
    assert done.returncode == 0 and "usage: poprun" in done.stdout, done


def test_training_that_is_asked_to_save_while_it_loads_goes_on():
    packages = ("popxl_gpt", "popxl_gpt.demo", "popxl_gpt.demo.starting")
    done = asked(
        "run_path", [str(TESTS.parents[1] / "demo/pretraining.py"), "--version"], *packages
    )
    assert done.returncode == 0 and done.stdout.startswith("popxl-gpt "), done


SCRIPT = """
trap 'echo the script' USR1
kill -USR1 $$
exec "$PYTHON" -c '
import os, signal
signal.signal(signal.SIGUSR1, lambda number, frame: print("what it has started"))
os.kill(os.getpid(), signal.SIGUSR1)
'
"""


def test_a_shell_script_cannot_hear_that_it_is_asked_to_save_but_what_it_starts_can():
    launcher = '"$PYTHON" -I -S "$1" $$ sh -c "$2"; exit $?'
    done = subprocess.run(
        ["sh", "-c", launcher, "sh", die_with_parent.__file__, SCRIPT],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment(PYTHON=sys.executable),
        start_new_session=True,
    )
    assert (done.returncode, done.stdout) == (0, "what it has started\n"), done


@pytest.mark.multi
def test_an_instance_that_is_asked_to_save_before_it_can_hear_it_goes_on():
    body = "os.kill(os.getpid(), signal.SIGUSR1); sys.exit('goes on')"
    done = launch(["--num-instances", 1], ["-c", RANKED + body])
    assert (done.code, "goes on" in done.said) == (1, True), done
