"""Runs of the training job that end before their time, and go on: as real processes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data import example
from data.records import RecordWriter

pytestmark = pytest.mark.multi
ROOT = Path(__file__).parents[3]
STEPS, EVERY = 48, 6
RECORDS = 37
"""An epoch ends within a global batch."""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    """A TFRecord file of random tokens."""
    path = tmp_path_factory.mktemp("data") / "train-0.tfrecord"
    records = np.random.default_rng(0).integers(0, 61, (RECORDS, 9))
    with RecordWriter(path) as writer:
        for payload in example.encode(records):
            writer.write(payload)
    return path


def command(folder: Path, tokens: Path, *flags: object) -> "list[str]":
    settings = {
        "config": "tiny", "name": "run", "run_folder": folder, "input_files": tokens, "validation_files": tokens,
        "vocabulary_size": 61, "hidden_size": 24, "heads": 3, "dropout": 0.1, "steps": STEPS, "global_batch_size": 4,
        "micro_batch_size": 2, "device_iterations": 2, "schedule": "cosine", "warmup_steps": 4, "validate_every": 8,
        "validation_batches": 2, "checkpoint.every": EVERY, "log_every": 8, "data_parallel": 1, "tensor_parallel_1": 1,
        "tensor_parallel_2": 1,
    }  # fmt: skip
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return [sys.executable, str(ROOT / "demo/pretraining.py"), *words, *map(str, flags)]


def start(words: "list[str]") -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def finish(words: "list[str]", code: int = 0) -> str:
    process = start(words)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


def left_by(folder: Path) -> "tuple[str, dict[str, str]]":
    """The metrics, and the hashes of the files of the last checkpoint."""
    manifest = json.loads((folder / f"run/checkpoints/step_{STEPS:08d}/checkpoint.json").read_text())
    assert manifest["step"] == STEPS
    hashes = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    return (folder / "run/metrics.jsonl").read_text(), {**hashes, "seed": str(manifest["seed"])}


def steps_in(folder: Path) -> int:
    metrics = folder / "run/metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def kill_at_a_random_moment(process: subprocess.Popen, folder: Path, choice: random.Random) -> None:
    """SIGKILL during a step, or as soon as a checkpoint is being written."""
    wanted = steps_in(folder) + choice.randrange(1, STEPS)
    in_a_save = choice.random() < 0.5
    while process.poll() is None:
        is_saving = any((folder / "run/checkpoints").glob(".step_*"))
        if (in_a_save and is_saving and steps_in(folder) > EVERY) or (not in_a_save and steps_in(folder) >= wanted):
            time.sleep(choice.random() * 0.01)
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.001)
    process.communicate(timeout=60)


@pytest.fixture(scope="module")
def uninterrupted(tokens, tmp_path_factory) -> "tuple[str, dict[str, str]]":
    """What a run leaves that nothing disturbs."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    finish(command(folder, tokens))
    return left_by(folder)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_killed_run_ends_bitwise_where_an_undisturbed_one_ends(seed, tokens, uninterrupted, tmp_path):
    choice = random.Random(seed)
    words = command(tmp_path, tokens, "--checkpoint.load", "auto")
    for _ in range(choice.randrange(1, 3)):
        kill_at_a_random_moment(start(words), tmp_path, choice)
    finish(words)
    assert left_by(tmp_path) == uninterrupted


def test_ctrl_c_saves_and_the_run_goes_on_bitwise(tokens, uninterrupted, tmp_path):
    words = command(tmp_path, tokens, "--checkpoint.load", "auto")
    process = start(words)
    while steps_in(tmp_path) < 9 and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, output
    assert "Traceback" not in output
    assert "continuing after step" in finish(words)
    assert left_by(tmp_path) == uninterrupted


def test_ctrl_c_does_not_wait_for_the_end_of_a_validation_which_the_run_that_goes_on_does(tokens, tmp_path):
    few = ("--steps", 2, "--warmup_steps", 0, "--device_iterations", 1, "--validate_every", 1)
    flags = (*few, "--validation_batches", 250)
    finish(command(tmp_path / "undisturbed", tokens, *flags))
    folder = tmp_path / "stopped"
    words = command(folder, tokens, *flags, "--checkpoint.load", "auto")
    process = start(words)
    while steps_in(folder) < 1 and process.poll() is None:
        time.sleep(0.002)
    time.sleep(0.1)  # into the second validation, which takes many times as long
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, output
    stopped = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["validation_loss"] is None for line in stopped] == [False, True]
    assert [path.name for path in (folder / "run/checkpoints").iterdir()] == ["step_00000002"]
    finish(words)
    metrics = [(path / "run/metrics.jsonl").read_text() for path in (folder, tmp_path / "undisturbed")]
    assert metrics[0] == metrics[1]


def test_a_new_run_leaves_an_older_runs_folder_alone(tokens, tmp_path):
    short = ("--steps", 4, "--warmup_steps", 0)
    finish(command(tmp_path, tokens, *short))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    finish(command(tmp_path, tokens, *short))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    assert (tmp_path / "run-2/metrics.jsonl").read_text() == (tmp_path / "run/metrics.jsonl").read_text()
