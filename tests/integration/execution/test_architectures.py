"""Models that are no GPT-2: the whole program against formulas, over layouts, and what goes in and
out.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from helpers.quick import cases

from popxl_gpt.config import Config, UserError, override
from popxl_gpt.demo.convert import main as convert
from popxl_gpt.execution.checkpoint import Position, SavedRun, find_trained, save
from popxl_gpt.execution.inference import evaluation, token_losses
from popxl_gpt.execution.initial_weights import initial_weights
from popxl_gpt.execution.model_size import flops_per_token, parameter_count
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.variables import copy_weights
from popxl_gpt.modelling import Role, model_table
from tests.integration.gpt_oracle import distance, random_batch, random_weights, small
from tests.integration.layers import cases as formulas
from tests.integration.plain_muon import newton_schulz
from tests.integration.runs import batches, own_gradients_of, train, train_session

TOLERANCE = 1e-5
MODELS = {
    "no biases, relu2": {"biases": False, "activation": "relu2"},
    "rms_norm, swiglu": {"norm": "rms_norm", "activation": "swiglu", "feed_forward_size": 40},
}
LAYOUTS = {
    "one": {},
    "all": {"data_parallel": 2, "tensor_parallel_1": 2, "tensor_parallel_2": 2},
}


def small_model(name: str, **changes: object) -> Config:
    return small(**{"heads": 4, **MODELS[name], **changes})


def of(weights: "dict[str, torch.Tensor]", prefix: str) -> "dict[str, torch.Tensor]":
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}


def token_losses_by_formula(
    config: Config, weights: "dict[str, torch.Tensor]", words: np.ndarray, labels: np.ndarray
) -> torch.Tensor:
    """Losses of a batch, [B*S]."""
    model, ids = config.model, torch.from_numpy(words).reshape(-1).long()
    x = formulas.embedding(model, of(weights, "embedding."), ids)
    for n in range(model.layers):
        x = formulas.decoder(model, of(weights, f"decoder.{n}."), x)
    head = {"word.weight": weights["embedding.word.weight"], **of(weights, "head.")}
    logits = formulas.logits(model, head, x, torch.arange(len(ids)))
    target = torch.from_numpy(labels).reshape(-1).long()
    return torch.nn.functional.cross_entropy(logits, target, reduction="none")


def leaves(weights: "dict[str, np.ndarray]") -> "dict[str, torch.Tensor]":
    return {n: torch.from_numpy(w).double().requires_grad_() for n, w in weights.items()}


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
    whole = {n: torch.from_numpy(w).double() for n, w in find_trained(place).weights()}
    expected = token_losses_by_formula(config, whole, words, labels).numpy()
    np.testing.assert_allclose(losses.reshape(-1), expected, rtol=2e-5, atol=2e-5)
    with pytest.raises(UserError, match="a checkpoint with .*norm|biases .*, not"):
        SavedRun(place, small(heads=4, steps=2, optimizer="muon"))
    with pytest.raises(UserError, match="--init_from: got .* with .*norm|biases .*, not"):
        initial_weights(place, small(heads=4))
    with pytest.raises(UserError, match="expected GPT-2's architecture"):
        convert(["to_hugging_face", str(place), str(tmp_path / "theirs")])


def test_muon_moves_each_matrix_of_a_gated_layer_by_itself():
    config = small_model("rms_norm, swiglu", **LAYOUTS["all"], optimizer="muon", steps=1)
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


def test_sizes_are_those_of_the_parameters_and_of_their_products():
    model = small_model("rms_norm, swiglu").model
    hidden, wide = model.hidden_size, model.feed_forward
    matrices = 4 * hidden**2 + 3 * hidden * wide
    biases = 4 * hidden + hidden + 2 * wide
    table = model.vocabulary_size * hidden
    expected = model.layers * (matrices + biases + 2 * hidden) + table + hidden
    assert parameter_count(model) == expected + model.positions * hidden
    attention = 2 * hidden * model.sequence_length
    products = model.layers * (matrices + attention) + table
    assert flops_per_token(model) == 6 * products
    assert parameter_count(dataclasses.replace(model, biases=False)) == (
        parameter_count(model) - model.layers * biases
    )
