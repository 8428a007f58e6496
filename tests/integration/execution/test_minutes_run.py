"""A run that has so many minutes, as a process."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from popxl_gpt.config.presets import preset
from popxl_gpt.config.saving import load
from popxl_gpt.data import example
from popxl_gpt.data.records import RecordWriter
from popxl_gpt.demo import pretraining
from popxl_gpt.demo.job.run import TrainingRun
from popxl_gpt.demo.job.timed_schedule import TimedSchedule
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.checkpoint_folder import checkpoints_in
from popxl_gpt.utils.errors import UserError
from tests.integration.runs import run_job

pytestmark = pytest.mark.multi
ROOT = Path(__file__).parents[3]
MINUTES = 0.25
LAYOUT = ("--data_parallel", "1", "--tensor_parallel_1", "1", "--tensor_parallel_2", "1")


def train(folder: Path, *flags: object) -> "tuple[float, str]":
    """Seconds that the process took, and what it printed."""
    words = [sys.executable, str(ROOT / "demo/pretraining.py"), "--run_folder", str(folder)]
    begin = time.monotonic()
    done = subprocess.run(
        [*words, *map(str, flags)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return time.monotonic() - begin, done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of a run with random tokens, and `seconds` that its process took."""
    folder = tmp_path_factory.mktemp("minutes")
    seconds, printed = train(
        folder, "--config", "tiny", "--name", "run", *LAYOUT, "--minutes", MINUTES, "--schedule", "wsd",
        "--decay_steps", 12, "--checkpoint.every", 50, "--checkpoint.keep", 1000, "--log_every", 1000,
    )  # fmt: skip
    (folder / "seconds").write_text(str(seconds))
    return folder


def lines_of(run: Path) -> "list[dict]":
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def fixed_by_clock(run: Path) -> "dict[str, Any]":
    """The decay as the clock has fixed it: from which step and rate, to which step."""
    newest = SavedRun(checkpoints_in(run / "checkpoints")[-1], load(run / "config.yml"))
    assert newest.position.schedule is not None
    return newest.position.schedule


def test_a_process_ends_with_its_minutes(folder):
    # the program is exact to three in a hundred (tests/unit/test_minutes.py); a busy machine is not
    seconds, lines = float((folder / "seconds").read_text()), lines_of(folder / "run")
    assert 0.75 * 60 * MINUTES < seconds < 2 * 60 * MINUTES
    fixed, config = fixed_by_clock(folder / "run"), load(folder / "run/config.yml")
    assert lines[-1]["step"] == fixed["end"]  # not the preset's 20 steps
    rates = [line["learning_rate"] for line in lines]
    lowest, decay = config.training.minimum_learning_rate, fixed["end"] - fixed["begin"]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(lowest + (fixed["rate"] - lowest) / decay / 2)
    assert config.training.steps == lines[-1]["step"] and config.training.minutes == MINUTES
    # as the preset's 12 of 20 steps, for a run that goes on with more minutes
    assert config.training.decay_steps == round(0.6 * config.training.steps)
    assert ">finished: step" in (folder / "run/report.html").read_text()


def test_a_checkpoint_has_the_rates_that_its_run_has_after_it(folder):
    run = folder / "run"
    config, lines = load(run / "config.yml"), lines_of(run)
    positions = [SavedRun(path, config).position for path in checkpoints_in(run / "checkpoints")]
    elapsed = [position.elapsed for position in positions]
    written = [lines[position.step - 1]["seconds"] for position in positions]
    assert elapsed == pytest.approx(written, abs=2.0) and elapsed == sorted(elapsed)
    *before, last = [position for position in positions if position.schedule is not None]
    for position in before:
        again = TimedSchedule(
            config.training, 60 * MINUTES, done=position.step, state=position.schedule
        )
        later = next((p.step for p in positions if p.step > position.step), None)
        if position.schedule == last.schedule:  # the end was not fixed anew
            expected = [line["learning_rate"] for line in lines[position.step : later]]
            steps = range(position.step, position.step + len(expected))
            assert [again.learning_rate(step) for step in steps] == expected
    assert last.schedule["end"] == last.step == lines[-1]["step"]


def test_a_run_whose_minutes_are_over_has_nothing_to_go_on_with(folder, capsys):
    flags = ("--config", folder / "run/config.yml", "--checkpoint.load", "auto")
    before = (folder / "run/metrics.jsonl").read_text()
    run_job(*flags)
    assert "continuing after step" in capsys.readouterr().out
    assert (folder / "run/metrics.jsonl").read_text() == before


def test_minutes_that_choosing_would_take_are_refused(monkeypatch):
    monkeypatch.setattr("popxl_gpt.demo.pretraining.since_start", lambda: 25.0)
    with pytest.raises(UserError, match=r"--minutes: got 0.5; expected at least 0.58, for trials"):
        run_job("--minutes", 0.5)
    with pytest.raises(UserError, match="--minutes: got several replicas without --config"):
        run_job("--minutes", 0.5, "--data_parallel", 2, "--micro_batch_size", 1)


def test_steps_are_kept_once_they_are_fixed_and_not_while_they_are_estimated():
    config, kept = preset("tiny"), []
    run = TrainingRun.__new__(TrainingRun)
    run.config, run.kept_steps, run.is_leader = config, config.training.steps, True
    run.folder = SimpleNamespace(keep_config=lambda config: kept.append(config.training.steps))
    run.clock = SimpleNamespace(state=None, training=lambda n: replace(config.training, steps=n))
    run._take_steps(30)
    assert not kept and run.config.training.steps == 30
    run.clock.state = {}
    for steps in (30, 30, 31):
        run._take_steps(steps)
    assert kept == [30, 31]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--auto", "--auto_seconds", 1)], ids=["minutes", "auto"])
def test_the_program_chooses_what_it_trains_and_says_why(flags, tmp_path):
    tokens = np.random.default_rng(0).integers(0, 61, (300, 65))
    with RecordWriter(tmp_path / "train-0.tfrecord") as writer:
        for payload in example.encode(tokens):
            writer.write(payload)
    files = ("--input_files", tmp_path / "train-0.tfrecord", "--vocabulary_size", 61)
    words = ("--minutes", 0.6, *files, "--sequence_length", 64, *flags)
    seconds, printed = train(tmp_path, *words)
    assert 0.75 * 36 < seconds < 2 * 36
    for word in ("machine", "data", "size", "batch", "rate", "precision", "expected"):
        assert f"\n{word} " in f"\n{printed}"
    assert (
        ("\nauto: 0.6_minutes, searched for" in printed) == ("\nchosen " in printed) == bool(flags)
    )
    config = load(tmp_path / "0.6_minutes/config.yml")
    assert (config.model.sequence_length, config.model.vocabulary_size) == (64, 61)
    end = fixed_by_clock(tmp_path / "0.6_minutes")["end"]
    assert lines_of(tmp_path / "0.6_minutes")[-1]["step"] == config.training.steps == end


def test_too_little_memory_for_rows_is_no_mistake_of_the_program(tmp_path, monkeypatch):
    monkeypatch.setattr(pretraining, "since_start", lambda: 0.0)
    words = ["--minutes", "1", "--run_folder", tmp_path, "--memmap_dir", tmp_path / "rows"]
    with pytest.raises(UserError, match="got 10240 bytes of host memory; expected at least"):
        pretraining.main([*map(str, words), "--host_memory", "10KiB"])
