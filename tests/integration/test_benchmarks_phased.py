"""The phased variants of the benchmarks measure what they say: the same model, data and loss as the
plain loop.
"""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.phased import PhasedRun, PhasedSteps
from benchmarks.plain_gpt import PlainGPT, PlainModel, PlainTrainer, PlainTraining
from benchmarks.shakespeare import BATCH, TRAINING, Characters
from benchmarks.train_step import Batches
from popxl_gpt.execution.variables import read_weights
from popxl_gpt.modelling.hugging_face import hugging_face_name
from tests import warm

ROOT = Path(__file__).resolve().parent.parent.parent
SIZES = {"layers": 2, "hidden_size": 16, "heads": 2, "sequence_length": 8}


@pytest.fixture(scope="module")
def text() -> Characters:
    random = np.random.default_rng(0)
    ids = random.integers(0, 11, 2000)
    return Characters(ids[:1700], ids[1700:], 11)


def plain_like(run: PhasedRun | PhasedSteps, training: PlainTraining) -> PlainTrainer:
    """A plain trainer that starts from the weights that a phased one has now."""
    model = run.config.model
    gpt = PlainGPT(PlainModel(**SIZES, vocabulary_size=model.vocabulary_size))
    weights = read_weights(run.session, run.config)
    names = {name: hugging_face_name(name).removeprefix("transformer.") for name in weights}
    gpt.load_state_dict(
        {names[name]: torch.from_numpy(np.array(array)) for name, array in weights.items()}
    )
    return PlainTrainer(gpt, training)


@pytest.mark.slow
def test_losses_follow_the_plain_loop_and_validation_covers_every_window(text):
    run = PhasedRun({"seed": 1, "steps": 50}, text, SIZES, {**TRAINING, "warmup_steps": 5}, BATCH)
    plain = plain_like(run, PlainTraining(steps=50, **{**TRAINING, "warmup_steps": 5}))
    batches = text.batches(1, SIZES["sequence_length"])
    for _ in range(8):
        ids, labels = (torch.from_numpy(part) for part in next(batches))
        assert run.step(1)["loss"] == pytest.approx(plain.step([(ids, labels)]), rel=1e-4)
    windows = [torch.from_numpy(part) for part in text.validation_windows(SIZES["sequence_length"])]
    assert len(windows[0]) % BATCH, (
        "the last batch must be a short one for this test to mean something"
    )
    assert run.finish()["validation_loss"] == pytest.approx(plain.evaluate([windows]), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("widening", [1, 3])
def test_train_step_gives_both_the_same_micro_batches(widening):
    options = {
        "model": {**SIZES, "vocabulary_size": 30},
        "micro_batch_size": 2,
        "accumulation": 3,
        "dropout": 0.0,
        "dtype": "float32",
        "widening": widening,
        "recomputation": True,
    }
    phased = PhasedSteps(options, Batches(options))
    plain = plain_like(
        phased, PlainTraining(steps=9, learning_rate=1e-4, weight_decay=0.1, max_norm=1.0)
    )
    batches = Batches(options)
    for _ in range(3):
        micro_batches = [
            (torch.from_numpy(ids), torch.from_numpy(labels)) for ids, labels in batches.next()
        ]
        assert phased.step(1)["loss"] == pytest.approx(plain.step(micro_batches), rel=1e-4)


@pytest.mark.multi
def test_train_step_holds_the_phased_step_to_its_bar():
    sizes = {**SIZES, "vocabulary_size": 30}
    flags = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    command = [warm.python(), "benchmarks/train_step.py", *flags, "--rounds", "1", "--warmup", "1"]
    command += ["--dtypes", "bfloat16", "--wide", "--variants", "eager", "phased", "phased, wide"]
    done = subprocess.run(
        command, cwd=ROOT, env=warm.with_children(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.strip().splitlines()[-1])["dtypes"]["bfloat16"]
    phased = [figures["variants"][name] for name in ("phased", "phased, wide")]
    plain = figures["variants"]["eager"]["speed_ratio"]
    assert (
        figures["bar"]["speed_ratio"]
        == max(variant["speed_ratio"] for variant in phased) / plain
        > 0
    )
    assert figures["bar"]["memory_ratio"] > 0
