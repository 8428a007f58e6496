"""Checkpoints that earlier versions of the program wrote load, and go on as they did then."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.quick import cases

from popxl_gpt.config.command_line import parse_command_line
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.manifest import FORMATS, manifest_text, read_manifest
from popxl_gpt.utils.errors import UserError
from tests.integration.runs import run_job

OLD = Path(__file__).parents[2] / "fixtures/checkpoints"
SAVED = "step_00000002"
FLAGS = """
    --config tiny --name run --layers 1 --vocabulary_size 16 --hidden_size 8 --heads 2 --steps 4
    --warmup_steps 0 --global_batch_size 4 --micro_batch_size 2 --sequence_length 8
    --data_parallel 1 --tensor_parallel_1 1 --tensor_parallel_2 1 --dropout 0
""".split()
FORMS = {
    "first": ((), 1e-5),
    "rounding_seed": (("--precision", "bfloat16", "--stochastic_rounding", "true"), 1e-2),
    "loss_scale": (("--precision", "float16", "--loss_scaling", "auto"), 1e-3),
    "checksums": ((), 1e-5),
    "validation_loss": (("--validate_every", "2", "--validation_batches", "1"), 1e-5),
    "validation_fingerprint": (("--validate_every", "2", "--validation_batches", "1"), 1e-5),
}
"""Settings of the runs that wrote them, and how near today's losses are: 16-bit types round, and
may be rounded elsewhere today."""


def losses(run: Path) -> "list[float]":
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("form", cases(FORMS, lambda form: form == "first"))
def test_a_run_goes_on_from_an_old_checkpoint_as_it_went_on_then(form, tmp_path):
    flags, near = FORMS[form]
    checkpoint = shutil.copytree(OLD / form / SAVED, tmp_path / SAVED)
    run_job(*FLAGS, *flags, "--run_folder", tmp_path, "--checkpoint.load", checkpoint)
    then = losses(OLD / form)[2:]
    np.testing.assert_allclose(losses(tmp_path / "run"), then, rtol=near)


@pytest.mark.slow
def test_there_is_a_checkpoint_of_every_form_up_to_todays(tmp_path):
    manifests = {form: read_manifest(OLD / form / SAVED / "checkpoint.json") for form in FORMS}
    assert {path.name for path in OLD.iterdir() if path.is_dir()} == set(FORMS)
    assert {manifest["format"] for manifest in manifests.values()} == set(FORMATS)
    known = {name for manifest in manifests.values() for name in manifest}
    flags = "--precision bfloat16 --stochastic_rounding true --loss_scaling auto".split()
    every = "--validate_every 2 --validation_batches 1".split()
    run_job(*FLAGS, *flags, *every, "--steps", 2, "--run_folder", tmp_path)
    today = read_manifest(tmp_path / "run/checkpoints" / SAVED / "checkpoint.json")
    assert set(today) <= known  # a new name: add a checkpoint that has it


def test_a_checkpoint_of_a_later_format_is_refused_with_the_way_out(tmp_path):
    path = shutil.copytree(OLD / "checksums" / SAVED, tmp_path / SAVED) / "checkpoint.json"
    later = {
        name: value for name, value in json.loads(path.read_text()).items() if name != "sha256"
    }
    path.write_text(manifest_text({**later, "format": max(FORMATS) + 1}))
    config = parse_command_line(FLAGS, program="test", default="tiny").config
    with pytest.raises(UserError, match="Use the version of this program that wrote it"):
        SavedRun(tmp_path / SAVED, config)
