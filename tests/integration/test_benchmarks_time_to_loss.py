"""Runs against the clock: what they measure, and how recipes are tuned."""

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import time_to_loss, timed_ours, timed_plain
from benchmarks.harness import make_parser
from benchmarks.modern_gpt import (
    Linear,
    ModernGPT,
    ModernModel,
    ModernTrainer,
    ModernTraining,
    Muon,
    rotated,
)
from benchmarks.time_to_loss import (
    BASELINES,
    Search,
    bars,
    started,
    steps_in,
    tuned,
)
from benchmarks.timed_runs import Run, factor_at
from popxl_gpt.config.presets import override, preset
from popxl_gpt.config.saving import to_mapping
from popxl_gpt.data.dataset import TokenDataset
from popxl_gpt.data.prepare import main as prepare
from popxl_gpt.execution.inference.evaluation import Evaluation
from tests import warm
from tests.integration.plain_muon import newton_schulz

ROOT = Path(__file__).resolve().parents[2]
SEQUENCE, VOCABULARY = 16, 280
CONSTANT = {"schedule": "constant", "warmup": 0.0, "lowest": 0.0}
SETTINGS = {
    "ours": {**CONSTANT, "mode": "phased-float32"},
    "nanogpt": {**CONSTANT, "mode": "eager-float32", "rate": 1e-2, "batch": 4, "size": "2x32x2"},
    "modern": {**CONSTANT, "mode": "eager-float32", "rate": 0.5, "batch": 4, "size": "2x32x2"},
}
MODEL = ModernModel(
    layers=2,
    hidden_size=32,
    heads=2,
    sequence_length=SEQUENCE,
    vocabulary_size=VOCABULARY,
    dtype=torch.float32,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Some of this repository's source, as data/prepare.py makes it."""
    folder = tmp_path_factory.mktemp("text") / "prepared"
    flags = {
        "inputs": ROOT / "config" / "*.py",
        "output": folder,
        "vocabulary_size": VOCABULARY,
        "sequence_length": SEQUENCE,
        "workers": 1,
    }
    prepare(["text", *(str(word) for n, v in flags.items() for word in (f"--{n}", v))])
    return folder


def options_of(kind: str, text: Path, steps: int) -> dict:
    sizes = {"vocabulary_size": VOCABULARY, "sequence_length": SEQUENCE}
    config = override(
        preset("tiny"),
        **sizes,
        **{"data_parallel": 1, "tensor_parallel_1": 1, "tensor_parallel_2": 1},
        **{"global_batch_size": 4, "micro_batch_size": 4, "learning_rate": 1e-2},
    )
    return {
        **sizes,
        "kind": kind,
        "settings": SETTINGS[kind],
        "config": to_mapping(config),
        "seed": 1,
        "text": str(text),
        "token_bytes": [1 + n % 7 for n in range(VOCABULARY)],
        "seconds": 1e6,
        "steps": steps,
        "is_probe": False,
        "started": time.monotonic(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", SETTINGS)
def test_a_run_learns_as_far_as_its_steps_go(kind, text):
    options = options_of(kind, text, steps=4)
    run = Run(options, (timed_ours.RECIPES | timed_plain.RECIPES)[kind])
    run.whole()
    assert run.record.step == 4 and run.record.tokens == 4 * 4 * SEQUENCE
    assert run.record.bits_per_byte < 7, "it has learned: 8 bits are no knowledge at all"
    assert 0 < run.record.first_seconds < run.record.seconds and len(run.record.call_seconds) == 3
    if kind == "ours":
        assert_is_the_applications_own_measure(run)


def test_a_run_ends_when_another_call_would_take_too_long(text, monkeypatch):
    clock = iter(range(0, 10_000, 10))  # each look takes ten seconds
    monkeypatch.setattr(Run, "seconds", property(lambda run: next(clock)))
    run = Run(
        {**options_of("modern", text, steps=0), "seconds": 200}, timed_plain.RECIPES["modern"]
    )
    run.options["is_probe"] = True
    run.whole()
    assert 2 < run.record.step < 10 and run.record.bits_per_byte is None


def assert_is_the_applications_own_measure(run: Run) -> None:
    sizes = TokenDataset(
        str(run.text / "validation-*.tfrecord"), SEQUENCE, VOCABULARY, stride=SEQUENCE
    )
    with run.recipe.evaluating():
        text_bytes = np.array(run.options["token_bytes"])
        session, config = run.recipe.forward, run.recipe.forward_config
        found = Evaluation(session, config, sizes, None, text_bytes).measure()
    assert run.record.bits_per_byte == pytest.approx(found.bits_per_byte, rel=1e-6)
    assert run.record.bytes == run.record.figures()["bytes"] == found.bytes


def test_rates_follow_the_time_that_is_over():
    cosine = {"schedule": "cosine", "warmup": 0.1, "lowest": 0.1}
    assert factor_at(cosine, 0.05) == pytest.approx(0.5, abs=1e-3)
    assert factor_at(cosine, 0.55) == pytest.approx(0.55, abs=1e-3)  # half of the way to 0.1
    stable = {"schedule": "wsd", "warmup": 0.0, "decay": 0.4, "lowest": 0.0}
    assert [factor_at(stable, p) for p in (0.0, 0.6, 0.8)] == pytest.approx([1, 1, 0.5], abs=1e-3)
    assert factor_at(stable, 1.2) == pytest.approx(0.0, abs=1e-3)


def test_a_search_goes_down_along_each_axis_and_measures_no_point_twice():
    def loss(settings):
        tried.append((settings["a"], settings["b"]))
        return (settings["a"] - 4) ** 2 + (settings["b"] - 1) ** 2

    search = Search(start={"a": 1, "b": 2}, axes={"a": range(7), "b": range(4)})
    for trials, best in ((1, {"a": 1, "b": 2}), (3, {"a": 3, "b": 2}), (50, {"a": 4, "b": 1})):
        tried: list = []
        assert tuned(search, loss, trials) == best
        assert len(tried) == len(set(tried)) <= trials


def test_the_mode_with_most_steps_in_the_minutes_is_taken():
    eager = {"first_seconds": 5.0, "call_seconds": 0.5}
    compiled = {"first_seconds": 50.0, "call_seconds": 0.4}
    assert steps_in(eager, 1) == pytest.approx(110)
    assert steps_in(compiled, 1) < steps_in(eager, 1)
    assert steps_in(compiled, 5) > steps_in(eager, 5)


def test_the_bar_is_the_better_baselines_loss_after_twice_the_time():
    def with_losses(*losses):
        return {minutes: {"bits_per_byte": loss} for minutes, loss in zip((1.0, 2.0), losses)}

    results = {
        "ours": with_losses(2.0),
        "nanogpt": with_losses(3.0, 2.5),
        "modern": with_losses(2.4, 1.9),
    }
    (bar,) = bars(results, [1.0])
    assert bar == {"minutes": 1.0, "ours": 2.0, "baseline": "modern", "its": 1.9, "met": False}


def test_the_share_of_the_ceiling_is_that_of_the_calls_after_the_first():
    common = {"sequence_length": SEQUENCE, "vocabulary_size": VOCABULARY}
    bench = SimpleNamespace(common=common)
    bench._sizes = partial(time_to_loss.Bench._sizes, bench)
    steps = {"step": 10, "tokens": 10 * 64, "ceiling": 1e9}
    runs = [{**steps, "call_seconds": seconds} for seconds in (0.1, 0.2, 0.4, None)]
    found = time_to_loss.Bench.step_share(bench, "modern", SETTINGS["modern"], runs)
    forward = 2 * 2 * (12 * 32 * 32 + 2 * SEQUENCE * 32) + 2 * 32 * VOCABULARY  # of a token
    assert found == pytest.approx(64 * 3 * forward / 0.2 / 1e9)
    before = [{**steps, "call_seconds": 0.1, "ceiling": None}]  # without a compiler
    assert time_to_loss.Bench.step_share(bench, "modern", SETTINGS["modern"], before) is None


def test_the_modern_baseline_sees_no_later_word_and_knows_distances_alone():
    torch.manual_seed(0)
    gpt = ModernGPT(MODEL)
    for p in gpt.parameters():
        torch.nn.init.normal_(p, std=0.1)
    ids = torch.randint(0, VOCABULARY, (1, SEQUENCE))
    other = ids.clone()
    other[0, 9:] = (ids[0, 9:] + 1) % VOCABULARY
    same = gpt.logits(ids)[0, :9] - gpt.logits(other)[0, :9]
    assert same.abs().max() < 1e-5
    assert gpt.logits(ids).abs().max() < MODEL.logit_cap

    q, k = torch.randn(2, 1, 1, 1, 16)
    q, k = (rotated(t.expand(1, SEQUENCE, 1, 16), gpt.cos, gpt.sin)[0, :, 0] for t in (q, k))
    scores = q @ k.T  # of equal queries and keys: by place alone
    for distance in (1, 5):
        at_distance = scores.diagonal(distance)
        assert at_distance.std() < 1e-5 < (at_distance[0] - scores[0, 0]).abs()


def test_the_modern_baselines_muon_is_the_plain_loop():
    torch.manual_seed(0)
    wide, tall, three = Linear(8, 12, 1.0), Linear(12, 6, 1.0), Linear(8, 24, 1.0)
    layers = {wide: 1, tall: 1, three: 3}
    muon = Muon([(layer.weight, n) for layer, n in layers.items()], 0.9, torch.float32)
    expected = {layer: layer.weight.detach().clone() for layer in layers}
    momenta = {layer: torch.zeros_like(layer.weight) for layer in layers}
    for _ in range(2):
        for layer, pieces in layers.items():
            layer.weight.grad = torch.randn_like(layer.weight)
            momenta[layer] = 0.9 * momenta[layer] + 0.1 * layer.weight.grad
            ahead = 0.9 * momenta[layer] + 0.1 * layer.weight.grad
            for part, u in zip(expected[layer].chunk(pieces), ahead.chunk(pieces)):
                length = max(1.0, part.shape[0] / part.shape[1]) ** 0.5
                part.copy_(part * (1 - 0.1 * 0.3) - 0.1 * length * newton_schulz(u))
        muon.step(0.1, weight_decay=0.3)
    for layer in layers:
        torch.testing.assert_close(layer.weight, expected[layer], rtol=1e-4, atol=1e-5)


def test_every_weight_of_the_modern_baseline_is_trained():
    torch.manual_seed(0)
    trainer = ModernTrainer(ModernGPT(MODEL), ModernTraining())
    before = {name: p.detach().clone() for name, p in trainer.gpt.named_parameters()}
    ids = torch.randint(0, VOCABULARY, (4, SEQUENCE))
    losses = [trainer.step(ids, ids.roll(-1, 1), 1.0) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert not [n for n, p in trainer.gpt.named_parameters() if torch.equal(p, before[n])]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_its_quick_form_measures_every_recipe_and_keeps_what_is_done(text, tmp_path):
    command = ["benchmarks/time_to_loss.py", "--text", str(text)]
    command += ["--sequence_length", str(SEQUENCE), "--results", str(tmp_path)]
    command += ["--minutes", "5", "--steps", "2", "--seeds", "1", "--trials", "0"]
    command += ["--modes", "eager-float32", "--recipes", "ours", "modern"]
    command += ["--ours", "--config modern --layers 2 --hidden_size 32 --heads 2"]

    def run():  # a warm parent; those that it measures start afresh
        return subprocess.run(
            [warm.python(), *command],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={**os.environ, **warm.ONE_THREAD},
        )

    done = run()
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert {k: sorted(map(float, v)) for k, v in figures["results"].items()} == {
        "ours": [5.0],
        "modern": [5.0, 10.0],
    }
    assert len(figures["bars"]) == 1
    for by_minutes in figures["results"].values():
        for result in by_minutes.values():
            assert 0 < result["bits_per_byte"] < 12
            assert result["tokens"] == 2 * 8 * SEQUENCE
            assert result["first_seconds"] > 0.5, "start-up counts"
            assert 0 < result["ceiling_share"] < 1
    assert len(list(tmp_path.iterdir())) == 3
    again = run()
    assert len(again.stdout.splitlines()) == len(done.stdout.splitlines()) - 3, "nothing ran again"
    assert json.loads(again.stdout.splitlines()[-1])["results"] == figures["results"]


def test_baselines_begin_at_the_points_that_the_command_line_says(capsys):
    words = ["size=4x192x3", "batch=16", "rate=0.002"]
    found = {kind: started(words, kind) for kind in BASELINES}
    both = {"size": "4x192x3", "batch": 16}
    assert found == {"nanogpt": {**both, "rate": 0.002}, "modern": both}
    parser = make_parser(None, time_to_loss.FLAGS)
    assert parser.parse_args(["--start", *words]).start == words
    for word in ("size=1x1x1", "batch=3", "layers=4", "size", "rate=no"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--start", word])
        assert f"--start: invalid choice: '{word}'" in capsys.readouterr().err


def test_a_missing_text_is_told_with_its_remedy(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["time_to_loss.py", "--text", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        time_to_loss.main()
    assert ended.value.code == 2
    assert "python data/prepare.py stdlib" in capsys.readouterr().err


def test_a_check_without_a_measured_bar_fails(tmp_path, monkeypatch):
    (tmp_path / "dataset.json").touch()
    monkeypatch.setattr(time_to_loss, "Bench", lambda _: None)
    monkeypatch.setattr(time_to_loss, "measured", lambda _: {"nanogpt": {}})
    words = ["time_to_loss.py", "--text", str(tmp_path), "--recipes", "nanogpt"]
    monkeypatch.setattr(sys, "argv", words)
    assert time_to_loss.main() == 0
    monkeypatch.setattr(sys, "argv", [*words, "--check"])
    assert time_to_loss.main() == 1
