"""`.ci/run` installs the programs that tests need where they are missing, and nothing else. A run of
tests says which files take its time, and a test that fails takes no other one with it.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


SYSTEM = ("bash", "dirname", "mktemp", "rm", "tee", "grep", "tail", "cat", "env")
NEEDED = ("c++", "cc", "ip", "chromium", "mpirun.openmpi", "mpirun.mpich", "sbatch", "munge")
PROGRAMS = {
    "make": "echo '1 passed in 0.1s'; exit $MAKE_CODE",
    "apt-get": 'echo "$@" >> "$CALLS"; [[ " $REFUSED " != *" ${@: -1} "* ]]',
    "id": "echo $USER_ID",
    "python3": f'exec {sys.executable} "$@"',
    **dict.fromkeys(NEEDED, "exit 0"),
}


@pytest.fixture
def ci_run(tmp_path):
    """Runs `.ci/run` on a machine that has all programs but some. Returns what it left, and the
    calls of apt-get.
    """

    def run(*without, user=0, refused="", make=0):
        programs, calls = tmp_path / "bin", tmp_path / "calls"
        programs.mkdir()
        for name in SYSTEM:
            (programs / name).symlink_to(shutil.which(name))
        for name, script in PROGRAMS.items():
            if name not in without:
                (programs / name).write_text(f"#!/bin/bash\n{script}\n")
                (programs / name).chmod(0o755)
        settings = {"PATH": programs, "CALLS": calls, "USER_ID": user, "REFUSED": refused}
        environment = {name: str(value) for name, value in {**settings, "MAKE_CODE": make}.items()}
        done = subprocess.run(
            [ROOT / ".ci/run"], env=environment, capture_output=True, text=True, timeout=60
        )
        assert "make" in without or done.stdout.splitlines()[-1] == "1 passed in 0.1s"
        return done, calls.read_text().splitlines() if calls.exists() else []

    return run


def test_a_machine_that_has_everything_gets_nothing(ci_run):
    done, calls = ci_run()
    assert (done.returncode, done.stderr, calls) == (0, "", [])


@pytest.mark.parametrize(
    "missing, package", [("chromium", "chromium"), ("c++", "g++"), ("python3", "python3-venv")]
)
def test_what_is_missing_is_installed(missing, package, ci_run):
    done, calls = ci_run(missing)
    assert done.returncode == 0
    assert calls == ["-qq update", f"-qq install -y --no-install-recommends {package}"]


def test_the_exit_code_is_that_of_the_tests(ci_run):
    assert ci_run("ip", make=1)[0].returncode == 1


def test_another_user_is_told_what_to_install(ci_run):
    done, calls = ci_run("chromium", "ip", user=1000)
    assert calls == []
    assert "Run: sudo apt install iproute2 chromium" in done.stderr


def test_a_package_that_a_system_has_not_costs_no_other_and_tests_run_nevertheless(ci_run):
    done, calls = ci_run("ip", "chromium", "cc", refused="update chromium")
    assert [call.split()[-1] for call in calls] == ["update", "gcc", "iproute2", "chromium"]
    assert "got an error from apt-get update; its lists of packages may be old." in done.stderr
    assert "got an error from apt-get; expected it to install chromium. Tests that" in done.stderr


@pytest.mark.parametrize("user, refused", [(1000, ""), (0, "make")])
def test_without_make_the_script_fails_and_says_why(user, refused, ci_run):
    done, _ = ci_run("make", user=user, refused=refused)
    assert done.returncode == 127
    assert "make" in done.stderr.splitlines()[0] and "expected" in done.stderr
    assert done.stdout.splitlines()[-1] == "the tests did not run to their end (exit code 127)"


def test_contributors_are_told_of_the_same_packages():
    packages = set(re.findall(r'^    ".+:(.+)"$', (ROOT / ".ci/run").read_text(), re.MULTILINE))
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (told,) = re.findall(r"sudo apt install (.+)", text)
    assert set(told.split()) == packages | {"python3-venv"} and len(packages) == 9
    assert os.access(ROOT / ".ci/run", os.X_OK)


LEAVES_PROCESSES = """
import gc, signal, subprocess
def check(process):
    assert process.poll() is not None
def test_that_fails():
    process = subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE)
    others = [subprocess.Popen(["sleep", "60"])]
    check(process)
def test_that_ignores_a_signal():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
def test_that_starts_what_hears_ctrl_c():
    process = subprocess.Popen(["sleep", "60"])
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == -signal.SIGINT
def test_beside_it():
    gc.collect()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""


@pytest.mark.slow
def test_a_test_that_fails_leaves_nothing_to_the_next_and_slow_files_are_told(tmp_path):
    conftest = (ROOT / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest.replace("LONG = 60", "LONG = 0"))
    (tmp_path / "test_processes.py").write_text(LEAVES_PROCESSES)
    words = [sys.executable, "-m", "pytest", "-W", "error", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*words, "--rootdir", tmp_path, tmp_path],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as in the background
    )
    assert "1 failed, 3 passed" in done.stdout, done.stdout
    assert re.search(
        r"slowest files, of \d+ s in all -+\n +[\d.]+ s test_processes.py\n", done.stdout
    )
