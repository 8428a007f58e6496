"""The phased variants of the benchmarks measure what they say: the same model, data and loss as the
plain loop.
"""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import train_step
from benchmarks.phased import PhasedRun, PhasedSteps, random_batches
from benchmarks.plain_gpt import PlainGPT, PlainModel, PlainTrainer, PlainTraining
from benchmarks.shakespeare import BATCH, TRAINING, Characters, config_of
from popxl_gpt.config.presets import override
from popxl_gpt.execution.variables import read_weights
from tests import warm
from tests.integration.gpt_oracle import hugging_face_name

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
    config = override(config_of("phased", 11, steps=50, seed=1), **SIZES, warmup_steps=5)
    run = PhasedRun(config, text)
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
        "master_weights": False,
    }
    phased = PhasedSteps(options)
    plain = plain_like(
        phased, PlainTraining(steps=9, learning_rate=1e-4, weight_decay=0.1, max_norm=1.0)
    )
    batches = random_batches(2 * 3, phased.config.model)
    for _ in range(3):
        parts = (torch.from_numpy(part).split(2) for part in next(batches))
        assert phased.step(1)["loss"] == pytest.approx(plain.step(list(zip(*parts))), rel=1e-4)


def offered(monkeypatch, dtype: str, *flags: str) -> dict[str, dict]:
    """Options of the variants of train_step.py, by name."""
    monkeypatch.setattr("sys.argv", ["train_step.py", *flags])
    variants = train_step.offered(train_step.parse(None, train_step.OFFLOADING), dtype)
    return {variant.name: variant.options for variant in variants}


def test_baselines_of_bfloat16_are_offered_with_either_attention_where_they_are_the_fastest(
    monkeypatch,
):
    for flags, names in (
        ((), ("eager, memory kept", "compiled, memory kept")),
        (("--wide",), ("eager, kept, wide", "compiled, kept, wide")),
        (("--offloading",), ("FSDP2", "FSDP2, compiled")),
    ):
        found = offered(monkeypatch, "bfloat16", *flags)
        for name in names:
            fused = found[f"{name}, fused"]
            assert fused["forms"] == {**found[name]["forms"], "attention": "fused"}
            assert found[name]["forms"]["attention"] == "products"
            assert {**fused, "forms": None} == {**found[name], "forms": None}
        assert len([name for name in found if name.endswith(", fused")]) <= 4
        for dtype, more in (("float32", ()), ("bfloat16", ("--dropout", "0.1"))):
            assert not any(
                name.endswith(", fused") for name in offered(monkeypatch, dtype, *flags, *more)
            )


def test_our_step_in_bfloat16_is_offered_with_master_weights_as_the_baselines_have(monkeypatch):
    sizes = {**SIZES, "vocabulary_size": 30}
    flags = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    name = "phased, wide, master weights"
    found = offered(monkeypatch, "bfloat16", "--wide", *flags)
    for variant, precision in (("phased, wide", "bfloat16"), (name, "float32")):
        steps = PhasedSteps(found[variant])
        assert steps.config.weight_precision == precision
        assert steps.config.execution.widening == 4 and np.isfinite(steps.step(1)["loss"])
    assert name not in offered(monkeypatch, "float32", "--wide")


@pytest.mark.exhaustive
@pytest.mark.multi
def test_train_step_holds_the_phased_step_to_its_bars():
    names = ["eager", "FSDP2", "phased", "phased, recomputing", "phased, wide"]
    sizes = {**SIZES, "vocabulary_size": 30}
    flags = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    command = [warm.python(), "benchmarks/train_step.py", *flags, "--rounds", "1", "--warmup", "1"]
    command += ["--dtypes", "float32", "--wide", "--offloading", "--variants", *names]
    done = subprocess.run(
        command, cwd=ROOT, env=warm.with_children(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    *shown, last = done.stdout.strip().splitlines()
    assert any(line.split()[:1] == ["variant"] and line.endswith("of ceiling") for line in shown)
    assert any(line.startswith("eager ") for line in shown) and str(ROOT) not in last
    result = json.loads(last)
    figures = result["dtypes"]["float32"]
    variants, bars = figures["variants"], (figures["bar"], figures["offloading_bar"])
    assert set(variants) == {*names} and result["tokens_per_step"] == 32
    assert figures["ceiling"].keys() == {"flops", "shares"}
    assert variants["FSDP2"]["loss"] == pytest.approx(variants["eager"]["loss"], rel=1e-6)
    best = max(variants[name]["speed_ratio"] for name in ("phased", "phased, wide"))
    assert bars[0]["speed_ratio"] == best / variants["eager"]["speed_ratio"] > 0
    assert all(bar["memory_ratio"] > 0 for bar in bars)
    assert sum("bar: phased" in line for line in shown) == 2
