"""Runs whose instances fail and are started again by `poprun --restarts`: the files of an
undisturbed run, bit for bit.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from popxl_gpt.data import example
from popxl_gpt.data.records import RecordWriter
from tests import warm
from tests.integration.runs import run_job
from tests.metrics_text import metrics_of

pytestmark = pytest.mark.multi
SCRIPT = str(Path(__file__).parents[3] / "demo/pretraining.py")
SECONDS = 120
STEPS, EVERY = 30, 6
FLAGS = f"""
    --config tiny --name run --vocabulary_size 61 --hidden_size 24 --heads 3 --dropout 0.1
    --steps {STEPS} --warmup_steps 0 --global_batch_size 4 --micro_batch_size 2 --sequence_length 8
    --data_parallel 2 --tensor_parallel_1 1 --tensor_parallel_2 1 --samples 0
    --checkpoint.every {EVERY} --validate_every 9 --validation_batches 1
""".split()
SAVED = f"checkpoints/step_{STEPS:08d}"


BESIDE = """
import errno, os, runpy, sys

rank, restarts = os.environ["RANK"], os.environ["POPDIST_RESTARTS"]
{does}
sys.argv = sys.argv[{words}:]
sys.path.insert(0, os.path.dirname(os.path.dirname(sys.argv[0])))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
NAMED = BESIDE.format(words=2, does="""
with open(f"{sys.argv[1]}.{rank}.{restarts}.partial", "w") as file:
    file.write(str(os.getpid()))
os.rename(file.name, file.name.removesuffix(".partial"))
""")  # fmt: skip
"""Instances that tell their processes: those that hear signals, whoever their launcher waits for."""
FAILING = BESIDE.format(words=3, does="""
metrics, file, read = *sys.argv[1:3], os.pread
is_bad = rank == "1" and restarts == "0"
def pread(number, *arguments):
    is_there = is_bad and os.path.exists(metrics) and open(metrics).read().count("\\n") > 11
    if is_there and os.path.samestat(os.stat(file), os.fstat(number)):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return read(number, *arguments)
os.pread = pread
""")  # fmt: skip
"""A disk that fails to read a file in instance 1, after twelve steps of the first start."""


def start(folder: Path, instances: int, program: str, *words: str) -> subprocess.Popen:
    """A run whose instances do something beside it, and the words for that and of the run."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("POPDIST_")}
    script = folder / "beside.py"
    script.write_text(program)
    launcher = f"-m poprun --num-replicas 2 --num-instances {instances} --restarts 2".split()
    return subprocess.Popen(
        [warm.launcher(), *launcher, warm.python(), script, *words, "--run_folder", folder],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**plain, "OMP_NUM_THREADS": "1"},
    )


def named(folder: Path, instances: int) -> subprocess.Popen:
    """A run whose instances `strike` finds."""
    return start(folder, instances, NAMED, str(folder / "process"), SCRIPT, *FLAGS)


def lines_in(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def wait_for(launcher: subprocess.Popen, found: "Callable[[], object]") -> object:
    until = time.monotonic() + SECONDS
    while not (value := found()):
        if launcher.poll() is not None or time.monotonic() > until:
            launcher.terminate()
            raise AssertionError(launcher.communicate(timeout=SECONDS))
        time.sleep(0.01)
    return value


def strike(launcher: subprocess.Popen, run: Path, number: int, instance: int, restarts: int):
    """Send a signal to an instance in a start of the run, once that has trained."""
    told = run.parent / f"process.{instance}.{restarts}"
    wait_for(launcher, told.exists)
    before = lines_in(run)
    wait_for(launcher, lambda: lines_in(run) != before and lines_in(run) > EVERY)
    os.kill(int(told.read_text()), number)


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
    launcher = named(tmp_path, 1)
    strike(launcher, tmp_path / "run-2", signal.SIGKILL, 0, 0)
    _, said = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 0, said
    assert files_of(tmp_path / "run-2") == undisturbed
    assert sorted(path.name for path in tmp_path.glob("run*")) == ["run", "run-2"]
    assert older.read_text() == '{"step": 1}\n'
    assert "poprun: exit code 137; all instances start again, restart 1 of 2." in said


@pytest.mark.exhaustive
@pytest.mark.slow
def test_instances_that_die_and_stop_start_again_and_train_the_same_bits(undisturbed, tmp_path):
    launcher = named(tmp_path, 2)
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
    flags += ["15", "--validation_files", str(held_out)] if name == "validation" else ["0"]
    run_job(*FLAGS, *flags, "--run_folder", tmp_path / "undisturbed")

    failing = tmp_path / f"{name}.tfrecord"
    words = [str(tmp_path / "run/metrics.jsonl"), str(failing), SCRIPT, *FLAGS, *flags]
    launcher = start(tmp_path, 2, FAILING, *words)
    _, said = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 0, said
    assert f"{failing}: got 'Input/output error' while reading; expected a disk" in said
    assert "poprun: exit code 74; all instances start again, restart 1 of 2." in said
    assert files_of(tmp_path / "run") == files_of(tmp_path / "undisturbed/run")
    steps = {int(path.name[-8:]) for path in (tmp_path / "run/checkpoints").glob("step_*")}
    (saved,) = steps - set(range(0, STEPS + 1, EVERY))  # what was trained until then
    assert saved == 15 if name == "validation" else saved >= 12
