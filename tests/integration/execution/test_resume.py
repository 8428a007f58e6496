"""Runs of the training job that end before their time, and go on: as real processes."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
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
STEPS, EVERY = 48, 6
KILLS = 5
"""Of one run. Each process but the last is killed, and each but the first goes on where one was. More
moments are those of `make torture`, kills.
"""
RECORDS = 37
"""An epoch ends within a global batch."""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    """A TFRecord file of random tokens."""
    return write_tokens(tmp_path_factory.mktemp("data") / "train-0.tfrecord", RECORDS)


def write_tokens(path: Path, count: int) -> Path:
    records = np.random.default_rng(0).integers(0, 61, (count, 9))
    with RecordWriter(path) as writer:
        for payload in example.encode(records):
            writer.write(payload)
    return path


def flags_of(folder: Path, tokens: Path, *flags: object) -> "list[str]":
    settings = {
        "config": "tiny", "name": "run", "run_folder": folder, "input_files": tokens, "validation_files": tokens,
        "vocabulary_size": 61, "hidden_size": 24, "heads": 3, "dropout": 0.1, "steps": STEPS, "global_batch_size": 4,
        "micro_batch_size": 2, "device_iterations": 2, "schedule": "wsd", "warmup_steps": 4, "initialisation": "width",
        "validate_every": 8, "validation_batches": 2, "checkpoint.every": EVERY, "log_every": 8, "data_parallel": 1, "tensor_parallel_1": 1,
        "tensor_parallel_2": 1,
    }  # fmt: skip
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))] + [
        *map(str, flags)
    ]


def start(flags: "list[str]") -> subprocess.Popen:
    words = [warm.python(), str(ROOT / "demo/pretraining.py"), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def left_by(folder: Path) -> "tuple[str, dict[str, str]]":
    """The metrics, and the hashes of the files of the last checkpoint."""
    manifest = json.loads(
        (folder / f"run/checkpoints/step_{STEPS:08d}/checkpoint.json").read_text()
    )
    assert manifest["step"] == STEPS
    hashes = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    return metrics_of(folder / "run"), {**hashes, "seed": str(manifest["seed"])}


def steps_in(folder: Path) -> int:
    metrics = folder / "run/metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def last_change(folder: Path) -> int:
    metrics = folder / "run/metrics.jsonl"
    return metrics.stat().st_mtime_ns if metrics.exists() else 0


def kill_at_a_random_moment(process: subprocess.Popen, folder: Path, choice: random.Random) -> None:
    """SIGKILL during one of the next steps, or as soon as a checkpoint is being written; at the end
    at the latest.
    """
    saves = folder / "run/checkpoints"
    wanted, left = (
        steps_in(folder) + choice.randrange(1, STEPS // KILLS),
        set(saves.glob(".step_*")),
    )
    in_a_save, before = choice.random() < 0.5, last_change(folder)
    while process.poll() is None and last_change(folder) == before:
        time.sleep(0.02)
    while process.poll() is None:
        steps, is_saving = steps_in(folder), any(path not in left for path in saves.glob(".step_*"))
        if (is_saving and steps > EVERY) or steps >= STEPS - 2 if in_a_save else steps >= wanted:
            time.sleep(choice.random() * 0.01)
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.002)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, output


@pytest.fixture(scope="module")
def uninterrupted(tokens, tmp_path_factory) -> Path:
    """The folder of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_job(*flags_of(folder, tokens))
    return folder


@pytest.mark.slow
def test_a_killed_run_ends_bitwise_where_an_undisturbed_one_ends(tokens, uninterrupted, tmp_path):
    flags = flags_of(tmp_path, tokens, "--checkpoint.load", "auto")
    for seed in range(KILLS):
        kill_at_a_random_moment(start(flags), tmp_path, random.Random(seed))
    process = start(flags)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert left_by(tmp_path) == left_by(uninterrupted)


def test_ctrl_c_saves_and_the_run_goes_on_bitwise(tokens, uninterrupted, tmp_path, capsys):
    flags = flags_of(tmp_path, tokens, "--checkpoint.load", "auto")
    process = start(flags)
    while steps_in(tmp_path) < 9 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, output
    assert "Traceback" not in output
    run_job(*flags)
    assert "continuing after step" in capsys.readouterr().out
    assert left_by(tmp_path) == left_by(uninterrupted)


def test_ctrl_c_does_not_wait_for_the_end_of_a_validation_which_the_run_that_goes_on_does(
    tokens, tmp_path
):
    few = ("--steps", 2, "--warmup_steps", 0, "--device_iterations", 1, "--validate_every", 1)
    held_out = write_tokens(tmp_path / "held_out.tfrecord", 600)
    long = (*few, "--validation_batches", "all", "--validation_files", held_out)
    run_job(*flags_of(tmp_path / "undisturbed", tokens, *long))
    lines = (tmp_path / "undisturbed/run/metrics.jsonl").read_text().splitlines()
    begin, end = [json.loads(line)["seconds"] for line in lines]
    folder = tmp_path / "stopped"
    flags = flags_of(folder, tokens, *long, "--checkpoint.load", "auto")
    process = start(flags)
    while steps_in(folder) < 1 and process.poll() is None:
        time.sleep(0.01)
    time.sleep((end - begin) / 2)  # into the second validation, many times as long as its step
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, output
    stopped = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["validation_loss"] is None for line in stopped] == [False, True]
    assert [path.name for path in (folder / "run/checkpoints").iterdir()] == ["step_00000002"]
    run_job(*flags)
    metrics = [metrics_of(path / "run") for path in (folder, tmp_path / "undisturbed")]
    assert metrics[0] == metrics[1]


def test_a_new_run_leaves_an_older_runs_folder_alone(tokens, uninterrupted, tmp_path):
    shutil.copytree(uninterrupted, tmp_path / "runs")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs/run").rglob("*")}
    run_job(*flags_of(tmp_path / "runs", tokens))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs/run").rglob("*")} == before
    metrics = [metrics_of(tmp_path / "runs" / name) for name in ("run", "run-2")]
    assert metrics[0] == metrics[1]
