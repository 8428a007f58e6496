"""Runs whose instances fail and are started again by `poprun --restarts`: the files of an
undisturbed run, bit for bit.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from popxl_gpt.data import example
from popxl_gpt.data.records import RecordWriter
from tests import warm
from tests.integration.runs import run_job
from tests.metrics_text import metrics_of

pytestmark = pytest.mark.multi
ROOT = Path(__file__).parents[3]
SECONDS = 120
STEPS, EVERY = 40, 8
FLAGS = f"""
    --config tiny --name run --vocabulary_size 61 --hidden_size 24 --heads 3 --dropout 0.1
    --steps {STEPS} --warmup_steps 0 --global_batch_size 4 --micro_batch_size 2 --sequence_length 8
    --data_parallel 2 --tensor_parallel_1 1 --tensor_parallel_2 1 --samples 0
    --checkpoint.every {EVERY} --validate_every 12 --validation_batches 1
""".split()
SAVED = f"checkpoints/step_{STEPS:08d}"


FAILING = """
import errno, os, runpy, sys

metrics, file, read = *sys.argv[1:3], os.pread
is_bad = os.environ["RANK"] == "1" and os.environ["POPDIST_RESTARTS"] == "0"
def pread(number, *arguments):
    is_there = is_bad and os.path.exists(metrics) and open(metrics).read().count("\\n") > 11
    if is_there and os.path.samestat(os.stat(file), os.fstat(number)):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return read(number, *arguments)
os.pread = pread
sys.argv = sys.argv[3:]
sys.path.insert(0, os.path.dirname(os.path.dirname(sys.argv[0])))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A disk that fails to read a file in instance 1, after twelve steps of the first start."""


def start(
    folder: Path,
    instances: int,
    flags: "Sequence[str]" = (),
    script: "Sequence[str]" = (),
    python: str = sys.executable,
) -> subprocess.Popen:
    """A run, its instances by a Python; signals are for processes that are themselves instances."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("POPDIST_")}
    launcher = f"-m poprun --num-replicas 2 --num-instances {instances} --restarts 2".split()
    program = [python, *script, str(ROOT / "demo/pretraining.py"), *FLAGS, *flags]
    return subprocess.Popen(
        [warm.launcher(), *launcher, *program, "--run_folder", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**plain, "OMP_NUM_THREADS": "1"},
    )


def lines_in(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def process_of(run: Path, instance: int, restarts: int) -> "int | None":
    """That of an instance in a start of the run, where it runs."""
    marks = {f"RANK={instance}".encode(), f"POPDIST_RESTARTS={restarts}".encode()}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            given = set((folder / "environ").read_bytes().split(b"\0"))
        except OSError:
            continue
        if str(run.parent).encode() in words and marks <= given:
            return int(folder.name)
    return None


def wait_for(launcher: subprocess.Popen, found: "Callable[[], object]") -> object:
    until = time.monotonic() + SECONDS
    while not (value := found()):
        if launcher.poll() is not None or time.monotonic() > until:
            launcher.terminate()
            raise AssertionError(launcher.communicate(timeout=SECONDS))
        time.sleep(0.002)
    return value


def strike(launcher: subprocess.Popen, run: Path, number: int, instance: int, restarts: int):
    """Send a signal to an instance in a start of the run, once that has trained."""
    process = wait_for(launcher, lambda: process_of(run, instance, restarts))
    before = lines_in(run)
    wait_for(launcher, lambda: lines_in(run) != before and lines_in(run) > EVERY)
    os.kill(process, number)


def files_of(run: Path) -> "dict[str, bytes]":
    tensors = {path.name: path.read_bytes() for path in (run / SAVED).glob("*.safetensors")}
    return {**tensors, "metrics": metrics_of(run).encode()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> "dict[str, bytes]":
    folder = tmp_path_factory.mktemp("undisturbed")
    run_job(*FLAGS, "--run_folder", folder)
    return files_of(folder / "run")


def test_a_process_that_is_killed_goes_on_from_its_last_checkpoint_bitwise(undisturbed, tmp_path):
    older = tmp_path / "run/metrics.jsonl"
    older.parent.mkdir()
    older.write_text('{"step": 1}\n')  # another run has the name: this one takes the next
    launcher = start(tmp_path, 1)
    strike(launcher, tmp_path / "run-2", signal.SIGKILL, 0, 0)
    _, said = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 0, said
    assert files_of(tmp_path / "run-2") == undisturbed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run-2"]
    assert older.read_text() == '{"step": 1}\n'
    assert "poprun: exit code 137; all instances start again, restart 1 of 2." in said


@pytest.mark.slow
def test_instances_that_die_and_stop_start_again_and_train_the_same_bits(undisturbed, tmp_path):
    launcher = start(tmp_path, 2)
    strike(launcher, tmp_path / "run", signal.SIGKILL, 1, 0)
    strike(launcher, tmp_path / "run", signal.SIGSTOP, 0, 1)
    _, said = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 0, said
    assert files_of(tmp_path / "run") == undisturbed
    assert said.splitlines()[-1] == "poprun: ended with exit code 0 after 2 of 2 restarts."


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "validation"])
def test_a_disk_that_fails_in_one_instance_costs_no_step_and_the_run_starts_again(name, tmp_path):
    data, held_out = (tmp_path / f"{part}.tfrecord" for part in ("train", "validation"))
    for path in (data, held_out):
        with RecordWriter(path) as writer:
            for row in np.random.default_rng(1).integers(0, 61, (24, 1, 9)):
                writer.write(*example.encode(row))
    flags = ["--input_files", str(data), "--checkpoint.keep", "9", "--validate_every"]
    flags += ["20", "--validation_files", str(held_out)] if name == "validation" else ["0"]
    run_job(*FLAGS, *flags, "--run_folder", tmp_path / "undisturbed")

    script, failing = tmp_path / "failing.py", tmp_path / f"{name}.tfrecord"
    script.write_text(FAILING)
    words = [str(script), str(tmp_path / "run/metrics.jsonl"), str(failing)]
    launcher = start(tmp_path, 2, flags, words, warm.python())
    _, said = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 0, said
    assert f"{failing}: got 'Input/output error' while reading; expected a disk" in said
    assert "poprun: exit code 74; all instances start again, restart 1 of 2." in said
    assert files_of(tmp_path / "run") == files_of(tmp_path / "undisturbed/run")
    steps = {int(path.name[-8:]) for path in (tmp_path / "run/checkpoints").glob("step_*")}
    (saved,) = steps - set(range(0, STEPS + 1, EVERY))  # what was trained until then
    assert saved == 20 if name == "validation" else saved >= 12
