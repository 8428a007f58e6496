"""What training does around its steps: validation, checkpoints and samples, where a call of the
session may end anywhere, and where they fail.
"""

import errno
import gc
import json
import subprocess
import weakref
from pathlib import Path

import numpy as np
import pytest
from popxl.errors import RemoteMemoryError

from popxl_gpt.data import example
from popxl_gpt.data.records import RecordWriter
from popxl_gpt.data.tokenisation import train_tokenizer
from popxl_gpt.demo.job import run_clock, samples, text, validations
from popxl_gpt.demo.job.timed_schedule import TimedSchedule
from popxl_gpt.demo.job.validation import Validation
from popxl_gpt.execution.checkpoints import saving
from popxl_gpt.execution.checkpoints.checkpoint_folder import checkpoints_in
from popxl_gpt.execution.checkpoints.manifest import read_manifest
from popxl_gpt.utils.errors import DataError, LostError, UserError, failure_number
from tests import warm
from tests.integration.runs import run_job
from tests.metrics_text import metrics_of

FLAGS = """
    --config tiny --name run --layers 1 --hidden_size 8 --heads 1 --dropout 0 --warmup_steps 0
    --global_batch_size 2 --micro_batch_size 2 --sequence_length 8 --data_parallel 1
    --tensor_parallel_1 1 --tensor_parallel_2 1 --validation_batches 1
""".split()
pytestmark = pytest.mark.multi
TIMED = ("--minutes", 100, "--schedule", "wsd")


ROOT = Path(__file__).parents[3]
LACKING = """
import sys
sys.path[:0] = {paths}
import popdist
from popxl_gpt.utils.errors import UserError, exit_on_user_error
from popxl_gpt.demo import pretraining
from popxl_gpt.demo.job import samples

whole_lines = samples.whole_lines

def lacking(*arguments):
    if popdist.getInstanceIndex() == 1:
        raise UserError("data: got none in instance 1; expected some.")
    return whole_lines(*arguments)

samples.whole_lines = lacking
with exit_on_user_error():
    sys.exit(pretraining.main(sys.argv[1:]))
"""


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


def test_each_step_that_is_validated_is_saved(tmp_path):
    flags = "--steps", 5, "--validate_every", 2, "--checkpoint.keep", 9
    train(tmp_path, *flags, "--every_validation")
    saved = [path.name for path in checkpoints_in(tmp_path / "run/checkpoints")]
    assert saved == [f"step_{step:08}" for step in (2, 4, 5)]


def described(folder: Path) -> "list[dict]":
    """What the checkpoints of a run say about themselves, but for where the run is."""
    found = [read_manifest(path / "checkpoint.json") for path in checkpoints_in(folder)]
    for manifest in found:
        del manifest["sha256"], manifest["config"]
    return found


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
    often = ("--steps", 4, "--validate_every", 2, "--checkpoint.every", 2)
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
    # the checkpoint, too, or it could never be the best
    found, expected = (described(run / "checkpoints") for run in runs)
    assert found == expected and [each["validation_loss"] for each in found] == [
        losses(tmp_path / "undisturbed")[step] for step in (2, 4)
    ]


def test_a_batch_of_validation_that_another_process_cannot_read_ends_the_run_which_is_saved(
    tmp_path, monkeypatch
):
    agree = validations.gather

    def with_another(value, *arguments, **keywords):
        problem = [("validation: got no answer", errno.EIO)]
        others = [[None, *problem]] if value == [None, None] else []
        return agree(value, *arguments, **keywords) + others

    monkeypatch.setattr(validations, "gather", with_another)
    with pytest.raises(DataError, match="^instance 1: validation: got no answer$") as told:
        train(tmp_path, "--steps", 4, "--validate_every", 2)
    assert failure_number(told.value) == errno.EIO
    assert saved(tmp_path / "run/checkpoints") == {2: None}


@pytest.mark.slow
def test_a_checkpoint_that_takes_no_loss_costs_no_step(tmp_path, monkeypatch, capsys):
    def full(source, target):
        raise OSError(28, "No space left on device")

    few = ("--steps", 2, "--validate_every", 0)
    train(tmp_path, *few)
    monkeypatch.setattr(saving, "write_whole", full)
    train(tmp_path, "--steps", 2, "--validate_every", 2, "--checkpoint.load", "auto")
    told = capsys.readouterr().err
    assert "step_00000002: its validation loss could not be added: No space left" in told
    assert list(losses(tmp_path)) == [2]


# Losses of different measurements


@pytest.mark.slow
def test_a_flag_that_does_nothing_is_told_at_the_start(tmp_path):
    few = ("--run_folder", tmp_path, "--steps", 1, "--validate_every", 1)
    run_job(*FLAGS, *few, "--muon_momentum", 0.9)
    (file,) = tmp_path.glob("*/warnings.jsonl")
    (told,) = (json.loads(line)["text"] for line in file.read_text().splitlines())
    assert told.startswith("--muon_momentum: got 0.9, which does nothing with optimizer adamw.")


def test_a_checkpoint_names_what_its_loss_was_measured_on_and_a_change_is_told(tmp_path, capsys):
    few = ("--validate_every", 1, "--checkpoint.every", 1, "--checkpoint.keep", 9)
    train(tmp_path, *few, "--steps", 2)
    train(tmp_path, *few, "--steps", 3, "--checkpoint.load", "auto")
    assert "got validation losses measured on other data" not in capsys.readouterr().err
    other = ("--validation_batches", 2, "--checkpoint.load", "auto")
    train(tmp_path, *few, "--steps", 4, *other)
    assert "got validation losses measured on other data" in capsys.readouterr().err
    found = [each["validation_fingerprint"] for each in described(tmp_path / "run/checkpoints")]
    assert found[0] == found[1] == found[2] != found[3]
    train(tmp_path, *few, "--steps", 4, *other[:2], "--checkpoint.load", "best")
    told = capsys.readouterr()
    assert "step_00000003, step_00000002, step_00000001 with validation losses that" in told.err
    assert "continuing after step 4" in told.out


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


@pytest.mark.sampled(2)
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
def test_none_of_several_processes_writes_where_one_cannot_begin_to(written, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(LACKING.format(paths=[str(ROOT), str(ROOT / "runtime")]))
    flags = ("--data_parallel", 2, "--micro_batch_size", 1, "--steps", 3, "--samples", 1)
    launcher = [warm.launcher(), "-m", "poprun", "--num-instances", "2"]
    started = [*launcher, warm.python(), str(program)]
    words = [*started, *FLAGS, "--run_folder", tmp_path, *written, *flags]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for step in (2, 3):
        assert done.stderr.count(f"no samples at step {step}: data: got none in instance 1") == 1
    assert list(saved(tmp_path / "run/checkpoints")) == [3]
    assert not (tmp_path / "run/samples.jsonl").exists()


@pytest.mark.slow
def test_a_process_that_cannot_write_while_others_wait_for_it_says_why(
    written, tmp_path, monkeypatch
):
    def failing(*arguments):
        raise UserError("rows: got none; expected some.") from OSError(errno.EIO, "broken")

    def agreed(problem):
        if problem is not None:
            raise LostError("instance 1 does not answer")
        return [problem]

    monkeypatch.setattr(text, "write", failing)
    monkeypatch.setattr(samples, "gather_beside", agreed)
    with pytest.raises(UserError, match="rows: got none") as caught:
        train(tmp_path, *written, "--steps", 3, "--samples", 1)
    assert failure_number(caught.value) == errno.EIO


@pytest.mark.slow
def test_a_mistake_of_the_program_in_samples_is_no_warning(written, tmp_path, monkeypatch):
    def failing(*arguments):
        raise KeyError("rows")

    monkeypatch.setattr(text, "write", failing)
    with pytest.raises(KeyError):
        train(tmp_path, *written, "--steps", 3, "--samples", 1)


@pytest.mark.slow
def test_texts_leave_no_session_to_the_next_ones(written, tmp_path, monkeypatch):
    make, made = text.CachedModel, []

    def noted(*arguments):
        assert not [each for each in made if each() is not None]
        model = make(*arguments)
        made.append(weakref.ref(model.session._engine.machine))
        return model

    monkeypatch.setattr(text, "CachedModel", noted)
    gc.disable()  # it comes when it comes
    try:
        train(tmp_path, *written, "--steps", 5, "--samples", 1)
    finally:
        gc.enable()
    assert len(made) == 3
