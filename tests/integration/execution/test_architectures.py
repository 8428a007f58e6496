"""Models that are no GPT-2: the whole program against formulas, over layouts, and what goes in and
out.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from helpers.quick import cases

from popxl_gpt.config.presets import override
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.finding import find_trained
from popxl_gpt.execution.checkpoints.saved_state import Position
from popxl_gpt.execution.checkpoints.saving import save
from popxl_gpt.execution.exchange.initial_weights import initial_weights
from popxl_gpt.execution.host import run_steps
from popxl_gpt.execution.inference.generation import CachedModel
from popxl_gpt.execution.inference.inference import evaluation, token_losses
from popxl_gpt.execution.planning.model_size import flops_per_token, parameter_count
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.variables import copy_weights, read_gradients, write_whole_weights
from popxl_gpt.modelling.gpt import model_table
from popxl_gpt.modelling.parameters import Role
from popxl_gpt.utils.errors import UserError
from tests.integration.architectures import (
    MODELS,
    check_logits_and_append,
    doubles,
    leaves,
    merged,
    small_model,
    token_losses_by_formula,
)
from tests.integration.gpt_oracle import distance, random_batch, random_weights, small
from tests.integration.plain_muon import newton_schulz
from tests.integration.runs import batches, own_gradients_of, train, train_session

TOLERANCE = 1e-5
RATES = {"value_embedding.weight": 3.0, "bigram.weight": 0.2}
"""Learning rates of parameters over those of others of their roles."""
LAYOUTS = {
    "one": {},
    "together": {
        "recomputation": False,
        "widening": 2,
        "micro_batch_size": 1,
        "head_serialisation": 3,
    },
    "all": {"data_parallel": 2, "tensor_parallel_1": 2, "tensor_parallel_2": 2},
}


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("layout", cases(LAYOUTS, lambda layout: layout == "all"))
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_every_gradient_equal_the_formula(name, layout):
    config = small_model(name, **LAYOUTS[layout])
    weights = leaves(random_weights(config.model))
    expected = token_losses_by_formula(config, weights, *random_batch(config)).mean()
    expected.backward()
    loss, gradients, norm = own_gradients_of(config)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert gradients.keys() == weights.keys()
    worst = max((distance(gradients[n], w.grad.numpy()), n) for n, w in weights.items())
    assert worst[0] < TOLERANCE, worst
    whole = math.sqrt(sum(w.grad.square().sum().item() for w in weights.values()))
    assert norm == pytest.approx(whole, rel=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_of_one_layout_is_the_same_bytes_in_another(name, tmp_path):
    config = small_model(name, steps=2, optimizer="muon", learning_rate=0.01)
    _, session = train_session(config)
    place = save(session, config, tmp_path, Position(2, "data", None, None))
    other = override(config, **LAYOUTS["all"])
    restored = pretraining(other)
    SavedRun(place, other).restore(restored)
    again = save(restored, other, tmp_path / "again", Position(2, "data", None, None))
    for file in sorted(path.name for path in place.glob("*.safetensors")):
        assert (place / file).read_bytes() == (again / file).read_bytes(), file
    evaluating = evaluation(other)
    copy_weights(restored, evaluating)
    words, labels = random_batch(config)
    with evaluating:
        losses = token_losses(evaluating, other, words, labels)
    whole = doubles(dict(find_trained(place).weights()))
    expected = token_losses_by_formula(config, whole, words, labels).numpy()
    np.testing.assert_allclose(losses.reshape(-1), expected, rtol=2e-5, atol=2e-5)
    with pytest.raises(UserError, match="a checkpoint with .* .*, not"):
        SavedRun(place, small(heads=4, steps=2, optimizer="muon"))
    with pytest.raises(UserError, match="--init_from: got .* with .*, not"):
        initial_weights(place, small(heads=4))


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("layout", cases(LAYOUTS, lambda layout: layout == "all"))
@pytest.mark.parametrize("name", MODELS)
def test_texts_by_keys_that_are_kept_have_the_logits_of_the_whole_text(name, layout, monkeypatch):
    monkeypatch.setattr("popxl_gpt.execution.inference.cache.PROMPT_TOKENS", 4)
    config = small_model(name, **LAYOUTS[layout])
    weights = random_weights(config.model)
    texts = [list(text) for text in np.random.default_rng(2).integers(0, 37, (3, 7))]
    texts[1], texts[2] = texts[1][:3], texts[2][:6]
    model = CachedModel(config, 3, 7, 5)
    write_whole_weights(model.session, model.config, weights.items())
    with model.session:
        logits = model.start(texts)
        for _ in range(5):
            check_logits_and_append(config, weights, texts, logits)
            logits = model.append([text[-1] for text in texts])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, changes",
    [
        ("rotary, qk_norm, untied head", {}),  # without what convolutions kept
        ("layers of three kinds", {"window": 6, "convolution_size": 3}),  # and rings
        (
            "rotary, qk_norm, untied head",  # turns as fast as in the positions it was trained on
            {"rotary_scaling": "dynamic", "rotary_factor": 2.0, "rotary_original_positions": 16},
        ),
    ],
)
def test_a_text_beyond_the_positions_is_read_again(name, changes, monkeypatch):
    monkeypatch.setattr("popxl_gpt.execution.inference.cache.PROMPT_TOKENS", 4)
    config = small_model(name, max_positions=16, **changes)
    weights = random_weights(config.model)
    seen = [list(text) for text in np.random.default_rng(2).integers(0, 37, (2, 16))]
    seen[1] = seen[1][:11]
    model = CachedModel(config, 2, 16, 20)
    write_whole_weights(model.session, model.config, weights.items())
    with model.session:
        logits = model.start(seen)
        for _ in range(20):
            check_logits_and_append(config, weights, seen, logits)
            logits = model.append([text[-1] for text in seen])
            seen = [text[-8:] if len(text) > 16 else text for text in seen]


def test_documents_of_a_sequence_do_not_see_each_other_where_positions_turn():
    config = small_model("rotary, qk_norm, untied head", document_attention=True, **LAYOUTS["all"])
    words, labels = random_batch(config)
    words[words == config.model.end_of_text] = 1
    words[:, 4] = config.model.end_of_text
    weights = leaves(random_weights(config.model))
    evaluating, training = evaluation(config), pretraining(config)
    for session in (evaluating, training):
        write_whole_weights(session, config, random_weights(config.model).items())
    with evaluating:
        losses = token_losses(evaluating, config, words, labels)
    parts = []
    for part in (slice(0, 5), slice(5, None)):
        inside = words[:, part].shape[1]
        alone = override(config, sequence_length=inside, attention_serialisation=1)
        expected = token_losses_by_formula(alone, weights, words[:, part], labels[:, part])
        np.testing.assert_allclose(
            losses[:, part].reshape(-1), expected.detach().numpy(), rtol=2e-5, atol=2e-5
        )
        parts.append(expected)
    torch.cat(parts).mean().backward()
    with training:
        run_steps(training, config, words, labels, [0.0])
    for n, gradient in read_gradients(training, config).items():
        assert distance(gradient, weights[n].grad.numpy()) < TOLERANCE, n


@pytest.mark.slow
def test_adapters_have_the_gradients_of_what_they_add_to_each_projection():
    changes = {"lora_rank": 3, "lora_alpha": 5.0}
    for name in list(MODELS)[1:]:
        config = small_model(name, **changes, **LAYOUTS["all"])
        weights = leaves(random_weights(config.model))
        loss, gradients, _ = own_gradients_of(config)
        expected = token_losses_by_formula(
            config, merged(config, weights), *random_batch(config)
        ).mean()
        expected.backward()
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        assert gradients.keys() == {n for n in weights if "lora" in n}
        assert max(distance(g, weights[n].grad.numpy()) for n, g in gradients.items()) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["rms_norm, swiglu, grouped queries", "heads of a size of their own"]
)
def test_muon_moves_each_matrix_that_stands_beside_others_by_itself(name):
    config = small_model(name, **LAYOUTS["all"], optimizer="muon", steps=1)
    config = override(config, learning_rate=0.02, weight_decay=0.0, max_norm=0.0, warmup_steps=0)
    before = random_weights(config.model)
    _, after = train(config)
    weights = leaves(before)
    token_losses_by_formula(config, weights, *batches(config)[0]).mean().backward()
    for n, parameter in model_table(config.model).items():
        if parameter.role is not Role.WEIGHT:
            continue
        blocks = np.cumsum(parameter.blocks) * parameter.shape[1] // sum(parameter.blocks)
        for now, was, gradient in zip(
            *(
                np.split(t, blocks[:-1], axis=1)
                for t in (after[n], before[n], weights[n].grad.numpy())
            )
        ):
            moved = newton_schulz(torch.from_numpy(gradient).double())
            length = 0.02 * 0.2 * math.sqrt(max(moved.shape))
            assert distance(was - now, moved.numpy() * length) < 2e-3, n


@pytest.mark.slow
def test_an_embedding_rate_moves_embeddings_alone():
    config = small_model("rotary, qk_norm, untied head", steps=1, learning_rate=0.01)
    config = override(config, weight_decay=0.0, warmup_steps=0)
    before = random_weights(config.model)
    _, same = train(config)
    _, other = train(override(config, embedding_rate_multiplier=4.0))
    embeddings = {
        n
        for n in before
        if n.endswith(("embedding.weight", "word.weight", "shift.weight", "bigram.weight"))
    }
    assert len(embeddings) == 3 + config.model.layers
    for n, was in before.items():
        factor = 4.0 if n in embeddings else 1.0
        np.testing.assert_allclose(other[n] - was, factor * (same[n] - was), atol=1e-6, err_msg=n)
        assert np.any(same[n] != was), n


def share_of_rate(name: str) -> float:
    """The learning rate of a parameter over that of others of its role."""
    return next((rate for end, rate in RATES.items() if name.endswith(end)), 1.0)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("layout", cases(LAYOUTS, lambda layout: layout == "all"))
def test_embeddings_of_values_learn_faster_than_others_and_those_of_pairs_slower(layout):
    config = small_model("rotary, qk_norm, untied head", **LAYOUTS[layout], steps=1, epsilon=1e-3)
    config = override(config, learning_rate=0.01, embedding_rate_multiplier=3.0, warmup_steps=0)
    config = override(config, weight_decay=0.0, max_norm=0.0)
    before = random_weights(config.model)
    _, after = train(config)
    weights = leaves(before)
    token_losses_by_formula(config, weights, *batches(config)[0]).mean().backward()
    for n, parameter in model_table(config.model).items():
        gradient = weights[n].grad.numpy()
        rate = 0.01 * (3.0 if parameter.role is Role.EMBEDDING else 1.0)
        rate *= share_of_rate(n)
        expected = rate * gradient / (np.abs(gradient) + 1e-3)
        assert distance(before[n] - after[n], expected) < 2e-3, n


@pytest.mark.slow
def test_weight_decay_takes_its_share_of_matrices_and_of_nothing_else():
    config = small_model("rotary, qk_norm, untied head", steps=1, learning_rate=0.01)
    config = override(config, weight_decay=0.0, warmup_steps=0)
    before = random_weights(config.model)
    _, plain = train(config)
    _, decayed = train(override(config, weight_decay=0.5))
    for n, was in before.items():
        rate = 0.01 * share_of_rate(n)
        is_matrix = was.ndim == 2 and "convolution" not in n
        lost = 0.5 * rate * was if is_matrix else np.zeros_like(was)
        np.testing.assert_allclose(plain[n] - decayed[n], lost, atol=1e-6, err_msg=n)


def test_sizes_are_those_of_the_parameters_and_of_their_products():
    model = small_model("rms_norm, swiglu, grouped queries").model
    hidden, wide = model.hidden_size, model.feed_forward
    matrices = 3 * hidden**2 + 3 * hidden * wide  # half as many keys and values as queries
    biases = 2 * hidden + 2 * wide + 2 * hidden
    factors = hidden + 2 * hidden + hidden  # of convolutions: one of them of queries, keys, values
    table = model.vocabulary_size * hidden
    expected = model.layers * (matrices + biases + factors + 2 * hidden) + table + hidden
    assert parameter_count(model) == expected + model.positions * hidden
    attention = 2 * hidden * model.sequence_length
    products = model.layers * (matrices + attention) + table
    assert flops_per_token(model) == 6 * products
    assert parameter_count(dataclasses.replace(model, biases=False)) == (
        parameter_count(model) - model.layers * biases
    )


def test_a_sequence_of_one_token_has_none_before_it():
    config = small(token_shift=True, sequence_length=1)
    weights = random_weights(config.model)
    words, labels = random_batch(config)

    def losses(length: int) -> np.ndarray:
        changed = override(config, sequence_length=length)
        session = evaluation(changed)
        write_whole_weights(session, changed, weights.items())
        with session:
            again = (np.repeat(tokens, length, axis=1) for tokens in (words, labels))
            return token_losses(session, changed, *again)

    np.testing.assert_allclose(losses(1)[:, 0], losses(2)[:, 0], rtol=1e-6)
