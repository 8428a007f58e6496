"""The speed that a run tells is by the clock, the wait for data included."""

import json
import re
import time
from itertools import pairwise

import pytest

from popxl_gpt.config.presets import preset
from popxl_gpt.data.in_memory import SyntheticDataset
from popxl_gpt.demo.job import checkpoints
from popxl_gpt.demo.job import run as training_run
from popxl_gpt.demo.job.progress import FEWEST, Progress
from popxl_gpt.demo.job.progress_line import whole
from popxl_gpt.demo.job.validation import Validation
from tests.integration.runs import run_job

FLAGS = """
    --config tiny --name run --layers 1 --hidden_size 8 --heads 1 --dropout 0 --warmup_steps 0
    --global_batch_size 2 --micro_batch_size 2 --sequence_length 8 --data_parallel 1
    --tensor_parallel_1 1 --tensor_parallel_2 1 --validation_batches 1 --log_every 1
""".split()
TOKENS, STEPS = 2 * 8, 12


def slowed(monkeypatch, owner, name, seconds):
    """Let a function take so long more."""
    plain = getattr(owner, name)

    def slow(*arguments, **options):
        time.sleep(seconds)
        return plain(*arguments, **options)

    monkeypatch.setattr(owner, name, slow)


@pytest.fixture
def ends(monkeypatch):
    """When each call of the session ended, by the wall's clock."""
    found, plain = [], training_run.run_steps

    def timed(*arguments):
        result = plain(*arguments)
        found.append(time.time())
        return result

    monkeypatch.setattr(training_run, "run_steps", timed)
    return found


def lines_of(folder):
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def rates(printed):
    """Tokens per second of each line."""
    found = re.findall(r"  ([\d.]+) (k?)tokens/s  ", printed)
    return [float(number) * (1000 if kilo else 1) for number, kilo in found]


@pytest.mark.slow
def test_with_a_slow_source_all_that_is_told_of_speed_is_by_the_clock(
    tmp_path, monkeypatch, capfd, ends
):
    slowed(monkeypatch, SyntheticDataset, "read", 0.15)
    run_job(*FLAGS, "--run_folder", tmp_path, "--steps", STEPS, "--validate_every", 0)
    lines, (printed, errors) = lines_of(tmp_path), capfd.readouterr()
    assert len(ends) == STEPS
    # after the first call the machine's ceiling is measured, which is no part of a step
    for line, (before, after) in zip(lines[2:], pairwise(ends[1:])):
        assert line["step_seconds"] == pytest.approx(after - before, abs=0.05)
    clock = (ends[-1] - ends[1] + lines[1]["step_seconds"]) / (STEPS - 1)
    assert clock > 0.08
    assert rates(printed)[-1] == pytest.approx(TOKENS / clock, rel=0.05)
    waited = [line["data_seconds"] for line in lines]
    # two batches were made ahead, beside the first step, which compiles
    assert all(seconds > 0.05 for seconds in waited[4:])
    assert all(line["data_seconds"] <= line["step_seconds"] for line in lines)
    assert re.search(r"  \d+\.?\d* m?s \(\d+%\) waiting for data  ", printed.splitlines()[-9])
    assert errors.count("data: got steps that wait ") == 1
    report = (tmp_path / "run/report.html").read_text()
    assert re.search(r"waited for data</span><b>[\d.]+ s <small", report)
    assert "Waiting for data, share of the step" in report and "data: got steps that" in report


@pytest.mark.slow
def test_a_source_that_keeps_pace_and_what_comes_between_steps_cost_no_speed(
    tmp_path, monkeypatch, capfd, ends
):
    slowed(monkeypatch, SyntheticDataset, "read", 0.05)
    slowed(monkeypatch, training_run, "run_steps", 0.15)
    slowed(monkeypatch, Validation, "measure", 0.4)
    slowed(monkeypatch, checkpoints, "begin_save", 0.4)
    every = ("--validate_every", 4, "--checkpoint.every", 5)
    run_job(*FLAGS, "--run_folder", tmp_path, "--steps", STEPS, *every)
    lines, errors = lines_of(tmp_path), capfd.readouterr().err
    assert all(0.15 <= line["step_seconds"] < 0.4 for line in lines[1:])
    assert ends[-1] - ends[0] > 0.15 * (STEPS - 1) + 4 * 0.4
    assert sum(line["data_seconds"] for line in lines[1:]) < 0.05 * STEPS / 2  # beside the steps
    assert "data: got" not in errors
    for line in lines[1:]:
        passes = [line[f"{name}_seconds"] for name in ("forward", "backward", "update")]
        assert all(seconds > 0 for seconds in passes)
        assert sum(passes) <= line["step_seconds"] - 0.15 + 1e-5  # which is no pass
        assert line["rows_seconds"] == line["others_seconds"] == 0


@pytest.mark.slow
def test_of_several_processes_the_longest_wait_counts(tmp_path, monkeypatch):
    def two(mine, plain=training_run.gather, **options):
        (own,) = plain(mine, **options)
        if not isinstance(own, dict) or "Batches" not in own:
            return [own]
        problem, waited = own["Batches"]
        return [own, {**own, "Batches": (problem, max(waited, 0.5))}]

    monkeypatch.setattr(training_run, "gather", two)
    run_job(*FLAGS, "--run_folder", tmp_path, "--steps", 3, "--validate_every", 0)
    assert [line["data_seconds"] for line in lines_of(tmp_path)] == [0.5] * 3


def record(step):
    """Of a step, what its line is made of."""
    values = {"step": step, "tokens": step, "loss": 1.0, "validation_loss": None, "skipped": 0}
    return {**values, "learning_rate": 0.1, "gradient_norm": 1.0}


def test_the_first_call_drops_out_and_data_are_told_of_once_they_limit():
    progress = Progress(preset("tiny"), 0)
    progress.ran(1, 60.0, 59.0)
    assert "waiting" not in whole(progress.pieces(record(1)))
    assert progress.seconds_per_step == 60.0
    for run in range(1, 25):  # also when the window is full
        progress.ran(2, 1.0, 0.04 if run < 15 else 0.9)
        assert progress.seconds_per_step == 0.5
        told = progress.news_of_data()
        assert (told is not None) == (run == 16), run  # (14 * 0.04 + 2 * 0.9) / 16 > 0.1
        share = "waiting for data" in whole(progress.pieces(record(run)))
        assert share == (run > 14)
    brief = Progress(preset("tiny"), 0)
    for run in range(1, 30):  # not for some milliseconds of a busy machine
        brief.ran(1, 0.1, 0.05001)
        assert (brief.news_of_data() is None) == (run != 20), run
    fresh = Progress(preset("tiny"), 0)
    found = []
    for _ in range(8):
        fresh.ran(1, 2.0, 1.0)
        found.append(fresh.news_of_data())
    assert [each is not None for each in found] == [run == FEWEST for run in range(8)]
    assert found[FEWEST].startswith("data: got steps that wait 1.00 s of their 2.00 s for data; ")
