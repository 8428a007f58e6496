"""A global batch that grows over the first tokens, as the training job runs it."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from popxl_gpt.config.presets import preset
from popxl_gpt.config.schedules import stage_of, tokens_ahead
from popxl_gpt.config.schema import Config
from popxl_gpt.data import example
from popxl_gpt.data.records import RecordWriter
from popxl_gpt.data.sampling import BatchSampler
from popxl_gpt.execution.checkpoints import saving
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.modelling.gpt import model_table
from tests.integration.gpt_oracle import distance
from tests.integration.plain_training import train_plainly
from tests.integration.runs import run_job
from tests.metrics_text import metrics_of

pytestmark = pytest.mark.multi
SEQUENCE, RECORDS = 12, 29
SIZES = (4, 4, 4, 4, 4, 8, 8, 8, 12, 12)
"""Stages of 4 and of 8 sequences are over after 19 and 38, both within a step."""
SETTINGS = {
    "layers": 2, "hidden_size": 24, "heads": 3, "sequence_length": SEQUENCE, "vocabulary_size": 37, "dropout": 0.0,
    "data_parallel": 2, "tensor_parallel_1": 1, "tensor_parallel_2": 1, "micro_batch_size": 1, "widening": 2,
    "steps": len(SIZES), "schedule": "wsd", "warmup_steps": 2, "learning_rate": 3e-3, "max_norm": 0.5,
    "global_batch_size": 12, "rampup_batch_size": 4, "rampup_increment": 4, "rampup_tokens": 38 * SEQUENCE,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Random tokens, and a run on them whose batch grows."""
    folder = tmp_path_factory.mktemp("ramp")
    tokens = np.random.default_rng(0).integers(0, 37, (RECORDS, SEQUENCE + 1))
    with RecordWriter(folder / "train-0.tfrecord") as writer:
        for payload in example.encode(tokens):
            writer.write(payload)
    np.save(folder / "tokens.npy", tokens)
    run_job(*flags(folder), "--checkpoint.every", 1, "--checkpoint.keep", 99)
    return folder


def flags(folder: Path, **changes: object) -> "list[str]":
    values = {
        "config": "tiny", "name": "run", "run_folder": folder, "input_files": folder / "train-0.tfrecord",
        **SETTINGS, **changes,
    }  # fmt: skip
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def config() -> Config:
    return preset("tiny", **SETTINGS)


def metrics(folder: Path, name: str = "run") -> "list[dict]":
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def test_a_run_has_the_losses_and_weights_of_a_plain_loop_with_its_batches(folder):
    tokens, sampler = (
        np.load(folder / "tokens.npy"),
        BatchSampler(samples=RECORDS, global_batch_size=1, seed=config().training.seed),
    )
    order = np.concatenate([sampler.indices(number) for number in range(sum(SIZES))])
    parts = np.split(tokens[order], np.cumsum(SIZES)[:-1])
    weights = {
        name: parameter.initial(name, config().training.seed)
        for name, parameter in model_table(config().model).items()
    }
    expected, trained = train_plainly(
        config(), weights=weights, data=[(part[:, :-1], part[:, 1:]) for part in parts]
    )
    lines = metrics(folder)
    assert [line["global_batch_size"] for line in lines] == [*SIZES]
    assert [line["tokens"] for line in lines] == (np.cumsum(SIZES) * SEQUENCE).tolist()
    assert [line["loss"] for line in lines] == pytest.approx(
        [result.loss for result in expected], rel=1e-5
    )
    assert [line["gradient_norm"] for line in lines] == pytest.approx(
        [result.gradient_norm for result in expected], rel=1e-4
    )
    last = folder / f"run/checkpoints/step_{len(SIZES):08d}"
    for name, array in SavedRun(last, config()).weights():
        assert distance(array, trained[name]) < 1e-4, name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("step", [3, 5, 6], ids=["in a stage", "between stages", "in the next"])
def test_a_run_goes_on_bitwise_within_a_stage_and_between_stages(step, folder, tmp_path):
    checkpoint = folder / f"run/checkpoints/step_{step:08d}"
    again = flags(folder, run_folder=tmp_path)
    run_job(*again, "--checkpoint.load", checkpoint)
    lines = metrics_of(folder / "run").splitlines()
    assert metrics_of(tmp_path / "run").splitlines() == lines[step:]
    assert files_of(tmp_path / "run") == files_of(folder / "run")


def files_of(run: Path) -> "dict[str, str]":
    """Hashes of the last checkpoint's files."""
    path = run / f"checkpoints/step_{len(SIZES):08d}/checkpoint.json"
    return {name: entry["sha256"] for name, entry in json.loads(path.read_text())["files"].items()}


def test_steps_of_one_call_have_one_batch_and_all_state_goes_on_over_stages(folder, tmp_path):
    changes = {
        "run_folder": tmp_path, "dropout": 0.2, "precision": "bfloat16", "stochastic_rounding": True,
        "loss_scaling": "auto", "loss_scaling_window": 2, "device_iterations": 2, "widening": 1,
    }  # fmt: skip
    run_job(*flags(folder, **changes), "--checkpoint.every", 4, "--checkpoint.keep", 9)
    lines = metrics(tmp_path)
    assert [line["global_batch_size"] for line in lines] == [*(4,) * 6, 8, 8, 12, 12]
    assert [line["loss_scale"] for line in lines] == [
        2.0**n for n in (16, 16, 17, 17, 18, 18, 19, 19, 20, 20)
    ]
    # a run that goes on within a stage takes the state from the same place
    newer = tmp_path / "run/checkpoints/step_00000006"
    run_job(*flags(folder, **changes, name="again"), "--checkpoint.load", newer)
    again = metrics_of(tmp_path / "again").splitlines()
    assert again == metrics_of(tmp_path / "run").splitlines()[6:]


def test_a_batch_grows_later_where_the_disk_takes_no_checkpoint_and_no_step_is_lost(
    folder, tmp_path, monkeypatch
):
    write, full = saving.write_tensors, {"step_00000005", "step_00000006"}

    def written(tensors, path):
        if any(name in str(path) for name in full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(tensors, path)

    monkeypatch.setattr(saving, "write_tensors", written)
    run_job(*flags(folder, run_folder=tmp_path), "--checkpoint.every", 1)
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [*range(1, len(SIZES) + 1)]
    assert [line["global_batch_size"] for line in lines] == [*(4,) * 7, 8, 8, 12]
    told = (tmp_path / "run/warnings.jsonl").read_text().splitlines()
    assert len(told) == 2
    assert "got 'No space left on device'" in told[0] and "batches of 4 sequences; they" in told[0]
    monkeypatch.undo()
    again = flags(folder, run_folder=tmp_path / "again")
    run_job(*again, "--checkpoint.load", tmp_path / "run/checkpoints/step_00000009")
    assert metrics_of(tmp_path / "again/run").splitlines() == [
        metrics_of(tmp_path / "run").splitlines()[-1]
    ]


def test_a_resumed_stage_is_what_the_configuration_says_at_its_tokens():
    settings, seen, sizes = config(), 0, []
    for _ in SIZES:
        stage = stage_of(settings, seen)
        assert stage.training.rampup_batch_size is None
        sizes.append(stage.training.global_batch_size)
        seen += stage.tokens_per_step
    assert sizes == [*SIZES]
    assert tokens_ahead(settings, 0, len(SIZES)) == seen == sum(SIZES) * SEQUENCE
