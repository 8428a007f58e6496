"""Log-likelihoods of continuations, against Hugging Face's GPT-2."""

import numpy as np
import pytest
import torch

from popxl_gpt.config.presets import override
from popxl_gpt.execution.inference import scoring
from popxl_gpt.execution.inference.scoring import Continuation, score
from popxl_gpt.utils.errors import NotFiniteError
from tests.integration.gpt_oracle import hugging_face, random_weights, small

LENGTHS = ((2, 1), (9, 8), (33, 5), (34, 33), (51, 50), (70, 3), (12, 4), (13, 0))
"""Tokens of texts, and of their continuations. 50 positions are seen."""


def texts_of(vocabulary):
    generator = np.random.default_rng(3)
    return [
        Continuation(generator.integers(0, vocabulary, length).tolist(), count)
        for length, count in LENGTHS
    ]


def greedy_text(gpt, begin, count):
    """A text that goes on with the likeliest tokens."""
    tokens = list(begin)
    for _ in range(count):
        tokens.append(int(gpt(torch.tensor([tokens])).logits[0, -1].argmax()))
    return Continuation(tokens, count)


def expected(gpt, text, positions):
    tokens = text.tokens[-(positions + 1) :]
    chosen = gpt(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
    labels = torch.tensor(tokens[1:])
    begin = len(labels) - text.count
    picked = chosen.gather(1, labels[:, None])[begin:, 0]
    return float(picked.detach().sum()), bool((chosen.argmax(-1) == labels)[begin:].all())


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"data_parallel": 2, "tensor_parallel_1": 3, "tensor_parallel_2": 2, "vocabulary_size": 40},
        {"document_attention": True, "end_of_text": 5, "attention_serialisation": 4},
    ],
)
def test_scores_are_those_of_hugging_face_for_every_length_and_layout(layout):
    model = {"max_positions": 50, "sequence_length": 12, "widening": 2, **layout}
    config = small(**model, global_batch_size=4)
    weights = random_weights(config.model)
    gpt = hugging_face(config.model, weights)
    texts = texts_of(config.model.vocabulary_size)
    texts += [greedy_text(gpt, [3, 1], 9), greedy_text(gpt, list(range(30)), 4)]
    texts.append(Continuation([*texts[-1].tokens[:-1], 0], 4))
    done = []
    found = score(config, weights.items, texts, done.append)
    assert sum(done) == len(texts)
    wanted = [expected(gpt, text, 50) for text in texts]
    assert [each.is_likeliest for each in found] == [is_so for _, is_so in wanted]
    assert {each.is_likeliest for each in found if each.log_likelihood} == {True, False}
    got = [each.log_likelihood for each in found]
    np.testing.assert_allclose(got, [total for total, _ in wanted], rtol=1e-5, atol=1e-5)


def test_a_text_has_its_score_whatever_others_there_are():
    config = override(small(max_positions=50), widening=1, global_batch_size=1)
    weights, texts = random_weights(config.model), texts_of(37)
    (alone,) = score(config, weights.items, texts[1:2])
    together = score(config, weights.items, texts)[1]
    assert alone.log_likelihood == pytest.approx(together.log_likelihood, rel=1e-6)
    assert score(config, weights.items, []) == []


def test_a_long_context_takes_no_more_logits_at_a_time_than_a_short_one(monkeypatch):
    made, own = [], scoring.scoring
    monkeypatch.setattr(scoring, "ROWS", 64)
    monkeypatch.setattr(scoring, "scoring", lambda config: made.append(config) or own(config))
    config = override(
        small(max_positions=256, sequence_length=256), global_batch_size=1, head_serialisation=4
    )
    weights, generator = random_weights(config.model), np.random.default_rng(3)
    lengths = (200, *[9] * 5)
    texts = [Continuation(generator.integers(0, 37, length).tolist(), 3) for length in lengths]
    found = score(config, weights.items, texts)
    runs = [(each.model.sequence_length, each.execution) for each in made]
    assert [(length, e.widening, e.head_serialisation) for length, e in runs] == [
        (256, 1, 4),
        (32, 2, 1),
    ]
    gpt = hugging_face(config.model, weights)
    for text, each in zip(texts, found, strict=True):
        assert each.log_likelihood == pytest.approx(expected(gpt, text, 256)[0], rel=1e-5)


def test_a_likelihood_that_is_not_finite_is_no_score():
    config = override(small(max_positions=50), widening=1, global_batch_size=1)
    weights = {
        name: array * np.float32(1e30) for name, array in random_weights(config.model).items()
    }
    with pytest.raises(NotFiniteError, match="^log-likelihood: got nan for a text of 9 tokens; "):
        score(config, weights.items, texts_of(37)[1:2])


@pytest.mark.parametrize("layout", [{}, {"tensor_parallel_1": 3}])
def test_of_equal_logits_the_first_is_the_likeliest_in_every_layout(layout):
    sizes = {"max_positions": 50, "vocabulary_size": 39}
    config = override(small(**sizes, **layout), widening=1, global_batch_size=1)
    weights = random_weights(config.model)
    weights["embedding.word.weight"][:] = 0
    texts = [Continuation([1, word], 1) for word in (0, 1, 13, 38)]
    found = score(config, weights.items, texts)
    assert [each.is_likeliest for each in found] == [True, False, False, False]
