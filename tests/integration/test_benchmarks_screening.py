"""The techniques that are screened: each begins as the recipe without it, and learns."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import screened_gpt, screening
from benchmarks.modern_gpt import Bigrams, Convolution, ModernGPT, ModernModel, orthogonal
from popxl_gpt.config.presets import preset
from popxl_gpt.data.prepare import main as prepare

MODEL = ModernModel(
    layers=4,
    hidden_size=32,
    heads=2,
    sequence_length=16,
    vocabulary_size=64,
    dtype=torch.float32,
)
IDS = torch.arange(32).reshape(2, 16) * 7 % 64

OF_STEPS = [name for name in screening.TECHNIQUES if not name.endswith("_first")]
"""Those that change what a step does with its batch."""


def model_of(technique: str) -> screened_gpt.ScreenedGPT:
    torch.manual_seed(1)
    plain = ModernGPT(MODEL)
    torch.nn.init.normal_(plain.head.weight)  # it starts with zeros, which would hide all else
    gpt = screened_gpt.ScreenedGPT(MODEL, frozenset({technique}))
    gpt.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        gpt.expected = plain.logits(IDS)
    return gpt


@pytest.mark.parametrize("technique", [screening.NONE, *OF_STEPS])
def test_a_technique_begins_as_the_recipe_without_it(technique):
    gpt = model_of(technique)
    if technique == "back_out":  # which takes a fifth of the middle away
        gpt.blocks[0].back_out.data.zero_()
    with torch.no_grad():
        torch.testing.assert_close(gpt.logits(IDS), gpt.expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "technique", ["residual_scales", "back_out", "smear", "attention_gates", "value_gates"]
)
def test_a_technique_of_the_model_has_numbers_that_learn(technique):
    gpt, known = model_of(technique), {name for name, _ in ModernGPT(MODEL).named_parameters()}
    for block in gpt.blocks:  # they start with zeros, which pass nothing on
        torch.nn.init.normal_(block.output.weight)
        torch.nn.init.normal_(block.down.weight)
    gpt(IDS, IDS.roll(-1, 1)).backward()
    own = [p for name, p in gpt.named_parameters() if name not in known]
    assert own and all(p.grad.abs().sum() > 0 for p in own)


@pytest.mark.parametrize("way, worst", [(orthogonal, 0.35), (screened_gpt.polar, 0.15)])
def test_a_way_of_making_updates_orthogonal_brings_singular_values_near_one(way, worst):
    torch.manual_seed(1)
    u, _ = torch.linalg.qr(torch.randn(48, 32))
    values = torch.logspace(-1, 0, 32)
    found = torch.linalg.svdvals(way((u * values).mT[None])[0])
    assert (found - 1).abs().max() < worst


def test_rows_are_made_even_without_a_change_of_length():
    muon = screened_gpt.ScreenedMuon(frozenset({"normuon"}), [], 0.95, torch.float32)
    torch.manual_seed(1)
    u, part = torch.randn(8, 4) * torch.logspace(-2, 0, 8)[:, None], torch.zeros(8, 4)
    even = muon._even(u, part)
    assert float(even.norm()) == pytest.approx(float(u.norm()), rel=1e-5)
    np.testing.assert_allclose(even.norm(dim=1), u.norm() / 8**0.5, rtol=1e-4)


def test_soap_moves_along_the_polar_factor_of_a_gradient_that_stays_the_same():
    torch.manual_seed(1)
    gradients = torch.randn(3, 8, 12, dtype=torch.float64)  # its null space has no more than 1e-16
    muon = screened_gpt.Soap(frozenset(), [], 0.95, torch.float32)
    first, _, last = torch.linalg.svd(gradients, full_matrices=False)
    for _ in range(screened_gpt.REFRESH + 2):
        found = muon.directions((8, 12), gradients)
        torch.testing.assert_close(found, first @ last / 2, rtol=1e-5, atol=1e-5)


def test_soap_is_adam_where_rows_and_columns_are_their_own_eigenvectors():
    """Gradients with one element a row and a column have diagonal products, whose eigenvectors only
    put them in another order.
    """
    torch.manual_seed(1)
    weight, places = torch.nn.Parameter(torch.zeros(4, 4)), torch.randperm(4)
    adam = torch.optim.Adam([weight], lr=1.0, betas=(screened_gpt.BETA,) * 2)
    basis, scales = screened_gpt.Eigenbasis(torch.zeros(1, 4, 4)), torch.tensor([1.0, 2, 4, 8])
    for _ in range(screened_gpt.REFRESH):  # within which the first eigenvectors stay
        before, gradients = weight.detach().clone(), torch.zeros(4, 4)
        gradients[torch.arange(4), places] = scales * torch.randn(4)
        weight.grad = gradients
        adam.step()
        torch.testing.assert_close(-basis.direction(gradients[None])[0], weight.data - before)


def test_two_tokens_are_predicted_early_on_and_one_later():
    gpt, labels = model_of("multi_token"), IDS.roll(-1, 1)
    nats = -torch.log_softmax(gpt.expected, -1)
    first = nats.gather(2, labels[..., None]).mean()
    second = nats[:, :-1].gather(2, labels[:, 1:, None]).mean()
    for share, weight in ((0.0, 0.5), (1 / 6, 0.25), (1 / 3, 0.0), (0.9, 0.0)):
        gpt.begin_step(share)
        with torch.no_grad():
            torch.testing.assert_close(gpt(IDS, labels), first + weight * second)


@pytest.mark.parametrize(
    "technique, shapes",
    [("short_sequences_first", [(8, 8)]), ("small_batches_first", [(2, 16)] * 2)],
)
def test_an_early_batch_is_divided_without_a_change_of_its_tokens(technique, shapes):
    batch = np.arange(64).reshape(4, 16)
    (late,) = screening.divided(technique, False, batch)
    assert late is batch
    early = screening.divided(technique, True, batch)
    assert [part.shape for part in early] == shapes
    np.testing.assert_array_equal(np.concatenate([part.ravel() for part in early]), batch.ravel())


def test_a_batchs_seconds_are_the_medians_of_blocks_in_both_parts_of_a_run():
    every_tenth = ([1.0] * 9 + [11.0]) * 3  # 2 on average, of which a median of batches sees 1
    assert screening.seconds_of(every_tenth, [5.0] * 10) == pytest.approx((30 * 2 + 10 * 5) / 40)
    assert screening.seconds_of([], [3.0]) == 3.0
    assert screening.seconds_of([90.0] + [1.0] * 29, []) == 1.0  # the first compiles


@pytest.mark.parametrize(
    "technique, early, factor",
    [
        ("none", [(8, 256)], 1.0),
        ("short_sequences_first", [(16, 128)], 1.0),
        ("small_batches_first", [(4, 256)] * 2, 0.5**0.5),
    ],
)
def test_a_run_gives_its_steps_batches_rates_and_their_place(
    technique, early, factor, tmp_path, monkeypatch
):
    steps, shares = [], []

    def step(ids, labels, factor):
        assert torch.equal(labels.flatten()[:5], ids.flatten()[1:6])
        steps.append((tuple(ids.shape), factor))

    def logits(ids):
        return torch.zeros(*ids.shape, 300)

    made = SimpleNamespace(step=step, gpt=SimpleNamespace(begin_step=shares.append, logits=logits))
    monkeypatch.setattr(screened_gpt, "trainer_of", lambda *_: made)
    words = [f"w{number}" for number in range(49)]
    text = " ".join(words * 800)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text(text)
    (tmp_path / "held_out.txt").write_text(text[:9000])
    options = "--vocabulary_size 300 --sequence_length 256 --overwrite --workers 1".split()
    given = [str(tmp_path / "in"), "--validation_files", str(tmp_path / "held_out.txt")]
    assert prepare(["text", *given, "--output", str(tmp_path / "out"), *options]) == 0
    screening.run(technique, 0, tmp_path / "out", 6 * 8 * 256)
    assert shares == pytest.approx([number / 6 for number in range(6)])
    shapes, factors = zip(*steps)
    assert list(shapes) == early * 2 + [(8, 256)] * 4
    falling = [1.0, 1.0, 1.0, 1.0, 2 / 3, 1 / 3]  # over the second half of the run
    expected = [factor] * (2 * len(early)) + falling[2:]
    assert factors == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("technique", [screening.NONE, *OF_STEPS])
def test_a_technique_learns_from_the_first_step_on(technique):
    trainer = screened_gpt.trainer_of(technique, 0, MODEL, compiled=False)
    losses = [trainer.step(IDS, IDS.roll(-1, 1), 0.5) for _ in range(4)]
    assert np.isfinite(losses).all() and losses[-1] < losses[0]


def test_a_convolution_adds_what_is_shortly_before():
    layer, x = Convolution(4, 3), torch.randn(2, 6, 3)
    torch.nn.init.normal_(layer.weight)
    y = x.clone()
    for back in (1, 2, 3):
        y[:, back:] += layer.weight[back - 1] * x[:, :-back]
    torch.testing.assert_close(layer(x), y)


def test_bigrams_have_the_rows_that_the_applications_have():
    from popxl_gpt.modelling.embedding import GOLDEN_RATIO

    rows, words = 50, np.array([[3, 9, 3, 0]])
    table = Bigrams(rows, MODEL)
    table.table.weight.data = torch.arange(rows).float()[:, None].expand(rows, 32).clone()
    before = np.array([[-1, 3, 9, 3]])
    expected = (words + (before + 1) * round(rows * GOLDEN_RATIO) % rows) % rows
    np.testing.assert_array_equal(table(torch.from_numpy(words))[..., 0].detach(), expected)
    assert preset("modern").model.convolution_size == ModernModel.convolution_size


def test_an_interval_is_students_of_the_pairs():
    mean, low, high = screening.interval([0.01, 0.02, 0.03])
    assert mean == pytest.approx(0.02) and high - mean == pytest.approx(2.920 * 0.01 / 3**0.5)
    assert low == pytest.approx(2 * mean - high)
    assert screening.interval([0.01])[1:] == (-np.inf, np.inf)


def test_techniques_take_turns_with_the_recipe_without_them_seed_by_seed(tmp_path, monkeypatch):
    (tmp_path / "dataset.json").touch()
    order = []

    def submit(_, technique, seed, *__):
        order.append((seed, technique))
        done = {"technique": technique, "seed": seed, "bits": 1.0, "step": 1.0}
        return SimpleNamespace(result=lambda: done)

    pool = nullcontext(SimpleNamespace(submit=submit))
    monkeypatch.setattr(screening, "ProcessPoolExecutor", lambda *_: pool)
    words = ["screening.py", "normuon", "smear", "--seeds", "2", "--text", str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    assert screening.main() == 0
    assert order == [(seed, name) for seed in (0, 1) for name in ("none", "normuon", "smear")]
