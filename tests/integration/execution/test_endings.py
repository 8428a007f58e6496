"""Runs that end before their time, and runs that meet: the training job as real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.multi
ROOT = Path(__file__).parents[3]
SECONDS = 90
SETTINGS: "dict[str, object]" = {
    "config": "tiny", "name": "run", "vocabulary_size": 61, "hidden_size": 24, "heads": 3, "dropout": 0.1,
    "steps": 4, "warmup_steps": 0, "global_batch_size": 4, "micro_batch_size": 2, "sequence_length": 8,
    "data_parallel": 1, "tensor_parallel_1": 1, "tensor_parallel_2": 1, "samples": 0,
}  # fmt: skip
LONG = 100_000
"""Steps of a run that does not end by itself."""


def words(folder: Path, **settings: object) -> "list[str]":
    """The command line of a run in `folder`/runs/run; `__` stands for a dot."""
    given = {**SETTINGS, "run_folder": folder / "runs", **settings}
    flags = [
        word
        for name, value in given.items()
        for word in (f"--{name.replace('__', '.')}", str(value))
    ]
    return [sys.executable, str(ROOT / "demo/pretraining.py"), *flags]


def start(command: "list[str]", **options: object) -> subprocess.Popen:
    plain = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("RANK", "WORLD_SIZE", "POPDIST_"))
    }
    given = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "env": {**plain, "OMP_NUM_THREADS": "1"},
        "preexec_fn": hear_signals,
        **options,
    }
    return subprocess.Popen(command, **given)  # type: ignore[call-overload]


def hear_signals() -> None:
    """As in a terminal: what a shell starts in the background or under nohup ignores some."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def end(process: subprocess.Popen, number: "int | None" = None) -> "tuple[int, str, str]":
    """Send a signal, if one is given, and wait: exit code, output, errors."""
    try:
        if number is not None:
            process.send_signal(number)
        output, errors = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert "Traceback" not in (errors or ""), errors
    return process.returncode, output, errors


def steps_in(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def wait_for_steps(process: subprocess.Popen, run: Path, steps: int = 2) -> None:
    until = time.monotonic() + SECONDS
    while steps_in(run) < steps:
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.005)


def saved_in(folder: Path) -> "list[str]":
    return sorted(path.name for path in folder.iterdir())


# Runs that meet


def test_a_second_run_with_the_same_folder_for_checkpoints_is_refused(tmp_path):
    shared = {"checkpoint__save": tmp_path / "saved", "steps": LONG}
    first = start(words(tmp_path, **shared))
    wait_for_steps(first, tmp_path / "runs/run")
    code, _, errors = end(start(words(tmp_path, **shared, name="other")))
    assert code == 2, errors
    assert f"--checkpoint.save: got {tmp_path}/saved, to which another run is writing" in errors
    assert not (tmp_path / "runs/other").exists()
    code, _, errors = end(first, signal.SIGINT)
    assert code == 128 + signal.SIGINT, errors
    assert saved_in(tmp_path / "saved") == [f"step_{steps_in(tmp_path / 'runs/run'):08d}"]


def test_starts_of_one_name_at_once_get_a_folder_each(tmp_path):
    ends = [end(process) for process in [start(words(tmp_path)) for _ in range(4)]]
    assert [code for code, _, _ in ends] == [0] * 4, ends
    runs = sorted((tmp_path / "runs").iterdir())
    assert [run.name for run in runs] == ["run", "run-2", "run-3", "run-4"]
    for run in runs:
        assert steps_in(run) == 4
        assert saved_in(run / "checkpoints") == ["step_00000004"]


def test_of_starts_with_one_folder_for_checkpoints_one_trains_and_one_is_refused(tmp_path):
    both = [
        start(words(tmp_path, name=name, checkpoint__save=tmp_path / "saved"))
        for name in ("one", "other")
    ]
    ends = [end(process) for process in both]
    assert sorted(code for code, _, _ in ends) == [0, 2], ends
    (refused,) = (errors for code, _, errors in ends if code == 2)
    assert "--checkpoint.save: got" in refused
    assert saved_in(tmp_path / "saved") == ["step_00000004"]
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 4
