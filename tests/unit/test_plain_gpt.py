"""The plain PyTorch model and loop are held to Hugging Face's GPT-2, torch.optim and the textbook
formulas.
"""

import math

import pytest
import torch
from helpers.quick import Later

from benchmarks.plain_gpt import PlainGPT, PlainModel, PlainTrainer, PlainTraining
from tests.integration.plain_adamw import PlainAdamW

hugging_face_gpt = Later("tests.integration.hugging_face_gpt")
SIZES = {"layers": 2, "hidden_size": 24, "heads": 3, "sequence_length": 10, "vocabulary_size": 37}


def randomised(model: PlainModel, seed: int = 0) -> PlainGPT:
    """A model whose every parameter, gains and biases too, is random."""
    torch.manual_seed(seed)
    gpt = PlainGPT(model)
    with torch.no_grad():
        for p in gpt.parameters():
            p.copy_(torch.randn_like(p) * 0.2)
    return gpt


def tokens(count: int, batch: int = 2, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    ids = torch.randint(0, 37, (count, batch, 11), generator=torch.Generator().manual_seed(seed))
    return [(rows[:, :-1], rows[:, 1:]) for rows in ids]


def hugging_face(gpt: PlainGPT) -> torch.nn.Module:
    """Hugging Face's model with the same weights."""
    found = hugging_face_gpt.HuggingFaceGPT(gpt.model)
    found.gpt.transformer.load_state_dict(gpt.state_dict())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["fused", "products"])
@pytest.mark.parametrize("gelu", ["tanh", "sigmoid"])
def test_loss_logits_and_every_gradient_equal_hugging_face(attention, gelu):
    gpt = randomised(PlainModel(**SIZES, attention=attention, gelu=gelu)).double()
    oracle = hugging_face(gpt).gpt.double()
    ids, labels = tokens(1)[0]
    loss, expected_logits = gpt(ids, labels), oracle(ids).logits
    expected = torch.nn.functional.cross_entropy(expected_logits.flatten(0, 1), labels.reshape(-1))
    torch.testing.assert_close(gpt.logits(ids), expected_logits, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(loss, expected, rtol=1e-8, atol=0.0)
    loss.backward()
    expected.backward()
    gradients = {name: p.grad for name, p in oracle.transformer.named_parameters()}
    assert gradients.keys() == dict(gpt.named_parameters()).keys()
    for name, p in gpt.named_parameters():
        assert torch.linalg.vector_norm(
            p.grad - gradients[name]
        ) <= 1e-6 * torch.linalg.vector_norm(gradients[name]), name


def test_fresh_parameters_have_the_stated_spread():
    gpt = PlainGPT(
        PlainModel(layers=8, hidden_size=64, heads=2, sequence_length=64, vocabulary_size=500)
    )
    for name, p in gpt.named_parameters():
        if p.ndim == 2:
            assert p.std().item() == pytest.approx(
                0.02 / math.sqrt(16) if "c_proj" in name else 0.02, rel=0.05
            ), name
        else:
            assert torch.all(p == (1.0 if name.endswith("weight") else 0.0)), name


def test_weight_decay_reaches_matrices_and_embeddings_only():
    gpt = PlainGPT(PlainModel(**SIZES))
    names = {id(p): name for name, p in gpt.named_parameters()}
    decayed, spared = (
        [names[id(p)] for p in group["params"]] for group in gpt.parameter_groups(0.1)
    )
    assert sorted(decayed + spared) == sorted(names.values())
    assert all("ln_" in name or name.endswith("bias") for name in spared)
    assert not any("ln_" in name or name.endswith("bias") for name in decayed)


def test_formula_adamw_equals_the_one_of_torch():
    def train(make) -> list[torch.Tensor]:
        torch.manual_seed(3)
        p = torch.nn.Parameter(torch.randn(7, 5, dtype=torch.float64))
        optimizer = make(
            [{"params": [p], "weight_decay": 0.3}], lr=0.05, betas=(0.8, 0.95), eps=1e-3
        )
        for _ in range(10):
            p.grad = torch.randn_like(p)
            optimizer.step()
        return p.detach()

    torch.testing.assert_close(train(PlainAdamW), train(torch.optim.AdamW), rtol=1e-12, atol=1e-12)


class FormulaTrainer(PlainTrainer):
    """The loop with AdamW as a formula, and gradients that are scaled before it."""

    def __init__(self, gpt: PlainGPT, training: PlainTraining):
        super().__init__(gpt, training)
        betas, groups = (training.beta1, training.beta2), self.optimizer.param_groups
        self.optimizer = PlainAdamW(groups, lr=0.0, betas=betas, eps=training.epsilon)

    def _clip(self) -> None:
        super()._clip()
        torch._foreach_div_([p.grad for p in self.parameters], self.optimizer.grad_scale)


@pytest.mark.slow
def test_fast_loop_equals_formula_loop_over_many_steps():
    training = PlainTraining(
        steps=20,
        learning_rate=1e-2,
        minimum_learning_rate=1e-3,
        schedule="cosine",
        warmup_steps=5,
        weight_decay=0.1,
        max_norm=0.05,
    )
    runs = []
    for make in (PlainTrainer, FormulaTrainer):
        trainer = make(randomised(PlainModel(**SIZES)).double(), training)
        runs.append(([trainer.step(tokens(3, seed=i)) for i in range(20)], trainer.gradient_norm))
    assert runs[0][1] > training.max_norm, "clipping must be active for this test to mean something"
    assert runs[0][0] == pytest.approx(runs[1][0], rel=1e-6)


def test_accumulation_equals_one_large_batch():
    gpt = randomised(PlainModel(**SIZES)).double()
    trainer = PlainTrainer(gpt, PlainTraining(steps=1, learning_rate=1.0))
    parts = tokens(4)
    loss = trainer.gradients(parts)
    accumulated = [p.grad.clone() for p in gpt.parameters()]
    trainer.optimizer.zero_grad()
    whole = tuple(torch.cat(part) for part in zip(*parts))
    assert trainer.gradients([whole]) == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(
        accumulated, [p.grad for p in gpt.parameters()], rtol=1e-8, atol=1e-10
    )


def test_clipping_scales_to_the_maximum_and_counts_the_tied_weight_once():
    gpt = randomised(PlainModel(**SIZES)).double()
    trainer = FormulaTrainer(gpt, PlainTraining(steps=1, learning_rate=0.0, max_norm=0.25))
    trainer.step(tokens(2))
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in gpt.parameters()))
    assert norm == pytest.approx(0.25) and trainer.gradient_norm > 0.25
    assert (
        sum(p.numel() for p in gpt.parameters())
        == 37 * 24 + 10 * 24 + 2 * (12 * 24 * 24 + 13 * 24) + 2 * 24
    )


def test_schedule_warms_up_peaks_and_ends_at_the_minimum():
    training = PlainTraining(
        steps=11, learning_rate=1.0, minimum_learning_rate=0.1, schedule="cosine", warmup_steps=4
    )
    rates = [training.learning_rate_at(step) for step in range(11)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[7] == pytest.approx(0.55) and rates[10] == pytest.approx(0.1)
    linear = PlainTraining(steps=3, learning_rate=1.0, schedule="linear")
    assert [linear.learning_rate_at(step) for step in range(3)] == pytest.approx([1.0, 0.5, 0.0])


def test_bfloat16_follows_float32():
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        trainer = PlainTrainer(
            randomised(PlainModel(**SIZES)),
            PlainTraining(steps=10, learning_rate=1e-3),
            dtype=dtype,
        )
        losses.append([trainer.step(tokens(2)) for _ in range(10)])
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[1] != losses[0]


def test_dropout_changes_training_and_not_evaluation():
    model = PlainModel(**SIZES, dropout=0.5)
    trainer = PlainTrainer(randomised(model), PlainTraining(steps=1, learning_rate=0.0))
    batch = tokens(1)
    assert trainer.gradients(batch) != trainer.gradients(batch)
    assert trainer.evaluate(batch) == trainer.evaluate(batch)


@pytest.mark.slow
def test_the_baseline_takes_the_steps_of_hugging_faces_model():
    training = PlainTraining(steps=10, learning_rate=1e-2, weight_decay=0.1, max_norm=0.5)
    plain = randomised(PlainModel(**SIZES))
    losses = [
        [trainer.step(tokens(3, seed=i)) for i in range(5)]
        for trainer in (PlainTrainer(plain, training), PlainTrainer(hugging_face(plain), training))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
