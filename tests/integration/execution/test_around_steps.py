"""What training does around its steps: validation, checkpoints and samples, where a call of the
session may end anywhere, and where they fail.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from popxl.errors import RemoteMemoryError

from popxl_gpt.config import UserError
from popxl_gpt.data import DataError, example
from popxl_gpt.data.records import RecordWriter
from popxl_gpt.data.tokenisation import train_tokenizer
from popxl_gpt.demo import run_clock, text
from popxl_gpt.demo.validation import Validation
from popxl_gpt.execution.checkpoint_folder import checkpoints_in
from popxl_gpt.execution.manifest import read_manifest
from popxl_gpt.execution.minutes import TimedSchedule
from tests.integration.runs import run_job
from tests.metrics_text import metrics_of

FLAGS = """
    --config tiny --name run --layers 1 --hidden_size 8 --heads 1 --dropout 0 --warmup_steps 0
    --global_batch_size 2 --micro_batch_size 2 --sequence_length 8 --data_parallel 1
    --tensor_parallel_1 1 --tensor_parallel_2 1 --validation_batches 1
""".split()
TIMED = ("--minutes", 100, "--schedule", "wsd")


def train(folder: Path, *flags: object) -> None:
    run_job(*FLAGS, "--run_folder", folder, *flags)


def losses(folder: Path) -> "dict[int, float]":
    """Of each step that was validated."""
    lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return {
        line["step"]: line["validation_loss"]
        for line in lines
        if line["validation_loss"] is not None
    }


def saved(folder: Path) -> "dict[int, float | None]":
    """The checkpoints of a run, and the loss that each says it has."""
    found = [read_manifest(path / "checkpoint.json") for path in checkpoints_in(folder)]
    return {manifest["step"]: manifest.get("validation_loss") for manifest in found}


class Clock(TimedSchedule):
    """Six steps left are known from the fourth call on; before, one more is expected each time."""

    def tell(self, step: int, elapsed: float, closing: float) -> int:
        if step >= 4 and self.begin is None:
            self.begin, self.end = step, step + 6
        elif self.begin is None:
            self.end = step + 1
        self.end = max(self.end, step)
        return self.end


@pytest.mark.slow
def test_calls_that_end_between_the_steps_at_which_something_is_due_do_it_after_them(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(run_clock, "TimedSchedule", Clock)
    every = ("--validate_every", 1, "--checkpoint.every", 1, "--checkpoint.keep", 99)
    rates = ("--learning_rate", 0.01, "--minimum_learning_rate", 0.01)  # whatever the end
    train(tmp_path / "single", *TIMED, *rates, *every)
    expected = losses(tmp_path / "single")
    assert list(expected) == list(range(1, 11))
    checkpoint = tmp_path / "single/run/checkpoints/step_00000004"
    due = ("--device_iterations", 3, "--validate_every", 3, "--checkpoint.every", 3)
    few = ("--checkpoint.keep", 99, "--steps", 12, "--checkpoint.load", checkpoint)
    train(tmp_path / "threes", *TIMED, *rates, *due, *few)
    found = losses(tmp_path / "threes")
    assert found == {step: expected[step] for step in (7, 10)}
    assert saved(tmp_path / "threes/run/checkpoints") == found


@pytest.mark.slow
def test_an_estimate_of_the_last_step_is_not_validated_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(run_clock, "TimedSchedule", Clock)
    train(tmp_path, *TIMED, "--validate_every", 7)
    assert list(losses(tmp_path)) == [7, 10]


@pytest.mark.slow
def test_a_step_whose_validation_fails_has_its_line_and_is_validated_by_the_run_that_goes_on(
    tmp_path, monkeypatch
):
    often = ("--steps", 4, "--validate_every", 2)
    train(tmp_path / "undisturbed", *often)
    measure, calls = Validation.measure, []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise DataError("validation: got a file that is gone; expected it to stay.")
        return measure(*arguments)

    monkeypatch.setattr(Validation, "measure", failing)
    with pytest.raises(DataError):
        train(tmp_path / "disturbed", *often)
    assert saved(tmp_path / "disturbed/run/checkpoints") == {2: None}
    train(tmp_path / "disturbed", *often, "--checkpoint.load", "auto")
    runs = [tmp_path / name / "run" for name in ("disturbed", "undisturbed")]
    assert metrics_of(runs[0]) == metrics_of(runs[1])


# Samples


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> "tuple[object, ...]":
    """Flags for data with a tokenizer, and for samples on the way."""
    folder = tmp_path_factory.mktemp("written")
    tokenizer = train_tokenizer(["the cat sat on the mat. " * 20], 270)
    tokenizer.save(str(folder / "tokenizer.json"))
    with RecordWriter(folder / "train.tfrecord") as writer:
        for payload in example.encode(np.random.default_rng(0).integers(0, 250, (16, 9))):
            writer.write(payload)
    files = ("--input_files", folder / "train.tfrecord", "--tokenizer", folder / "tokenizer.json")
    return (*files, "--vocabulary_size", 270, "--validate_every", 0, "--sample_every", 2)


@pytest.mark.slow
def test_a_generation_that_the_device_does_not_hold_costs_no_step(written, tmp_path, capsys):
    few = ("--steps", 3, "--samples", 64, "--max_positions", 4096, "--device_memory", 700_000)
    train(tmp_path, *written, *few)
    told = capsys.readouterr().err
    for step in (2, 3):
        assert f"no samples at step {step}: device memory: got 700000 bytes" in told
    assert list(saved(tmp_path / "run/checkpoints")) == [3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        RemoteMemoryError("rows: got 'Input/output error'; expected a disk that works."),
        UserError("rows: got none; expected some."),
        MemoryError("Unable to allocate 1 TiB"),
        OSError(28, "No space left on device", "rows.npy"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_samples_that_cannot_be_written_are_told_of_and_cost_no_step(
    error, written, tmp_path, monkeypatch, capsys
):
    def failing(*arguments):
        raise error

    monkeypatch.setattr(text, "write", failing)
    train(tmp_path, *written, "--steps", 3, "--samples", 1)
    told = capsys.readouterr().err
    for step in (2, 3):
        assert f"no samples at step {step}: " in told
    assert list(saved(tmp_path / "run/checkpoints")) == [3]


@pytest.mark.slow
def test_a_mistake_of_the_program_in_samples_is_no_warning(written, tmp_path, monkeypatch):
    def failing(*arguments):
        raise KeyError("rows")

    monkeypatch.setattr(text, "write", failing)
    with pytest.raises(KeyError):
        train(tmp_path, *written, "--steps", 3, "--samples", 1)
