"""The whole phased program against Hugging Face's GPT-2: loss, logits, every gradient."""

import numpy as np
import pytest
from helpers.quick import cases

from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.execution import phases
from popxl_gpt.execution.batch_serialisation import LayerIO
from popxl_gpt.execution.inference.inference import generation, logits
from popxl_gpt.execution.variables import write_whole_weights
from tests.integration.gpt_oracle import (
    Expected,
    distance,
    expect,
    random_batch,
    random_weights,
    small,
)
from tests.integration.runs import gradients_of, worst_distance

TOLERANCE = 1e-5
CASES = {
    "plain": small(),
    "no recomputation": small(recomputation=False),
    "serialised attention": small(attention_serialisation=4),
    "serialised attention, no recomputation": small(attention_serialisation=4, recomputation=False),
    "one micro-batch": small(micro_batch_size=4),
    "two micro-batches of two": small(micro_batch_size=2),
    "micro-batches together": small(widening=2),
    "loss scaling": small(loss_scaling=512.0),
    "clipping": small(max_norm=0.01),
    "one layer": small(layers=1),
    "overlapped transfers": small(io_mode="io_overlapped"),
    "whole vocabulary": small(vocabulary_size=50257, layers=1, global_batch_size=2),
    "data parallel": small(data_parallel=2, micro_batch_size=2),
    "split heads and padded vocabulary": small(tensor_parallel_1=3),
    "split hidden size": small(tensor_parallel_2=2),
    "split every way": small(data_parallel=2, tensor_parallel_1=2, tensor_parallel_2=2, heads=4),
    "split every way, whole": small(
        data_parallel=2,
        tensor_parallel_1=2,
        tensor_parallel_2=2,
        heads=4,
        replicated_tensor_sharding=False,
    ),
    "wide feed-forward": small(feed_forward_size=40, hidden_size=36, heads=4),
}


def expected_of(config: Config) -> Expected:
    return expect(config.model, random_weights(config.model), *random_batch(config))


QUICK = ("plain", "serialised attention", "split every way")


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("case", cases(CASES, lambda case: case in QUICK))
def test_loss_and_every_gradient_equal_hugging_faces(case):
    config = CASES[case]
    expected = expected_of(config)
    loss, gradients, norm = gradients_of(config)
    assert loss == pytest.approx(expected.loss, rel=1e-5)
    worst = worst_distance(gradients, expected.gradients)
    assert worst[0] < TOLERANCE, worst
    whole = np.sqrt(sum(np.sum(np.square(array)) for array in expected.gradients.values()))
    assert norm == pytest.approx(whole, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", cases(["plain", "serialised attention", "whole vocabulary"], lambda case: case in QUICK)
)
def test_logits_of_the_forward_program_equal_hugging_faces(case):
    config = override(CASES[case], micro_batch_size=2)
    expected = expected_of(config)
    tokens = 2 * config.model.sequence_length
    session = generation(config, rows=tokens)
    write_whole_weights(session, config, random_weights(config.model).items())
    words, _ = random_batch(config)
    rows = np.tile(np.arange(tokens), (config.gradient_accumulation, 1))
    with session:
        got = logits(session, config, words, rows)
    assert distance(got.reshape(expected.logits.shape), expected.logits) < TOLERANCE


@pytest.mark.slow
def test_recomputation_does_not_change_a_bit_of_any_gradient():
    kept, again = (gradients_of(small(recomputation=is_on))[1] for is_on in (False, True))
    for name, array in kept.items():
        np.testing.assert_array_equal(array, again[name], err_msg=name)


@pytest.mark.slow
def test_a_program_that_drops_a_micro_batch_is_noticed(monkeypatch):
    make = LayerIO.make

    def make_with_fewer(*arguments):
        inputs, outputs, rows, steps, io_mode, group = arguments
        return make(inputs, outputs, rows, steps - 1, io_mode, group)

    monkeypatch.setattr(LayerIO, "make", make_with_fewer)
    config = CASES["plain"]
    _, gradients, _ = gradients_of(config)
    assert worst_distance(gradients, expected_of(config).gradients)[0] > 1000 * TOLERANCE


@pytest.mark.slow
def test_a_program_that_drops_the_tied_gradient_is_noticed(monkeypatch):
    monkeypatch.setattr(phases, "with_tied_gradient", lambda step, gradients, row: gradients)
    config = CASES["plain"]
    _, gradients, _ = gradients_of(config)
    distances = {
        name: distance(gradients[name], array)
        for name, array in expected_of(config).gradients.items()
    }
    assert distances.pop("transformer.wte.weight") > 1000 * TOLERANCE
    assert max(distances.values()) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    cases(sorted(random_weights(small(layers=1).model)), lambda name: name.endswith("qkv.weight")),
)
def test_a_perturbed_parameter_is_noticed(name):
    config = small(layers=1)
    weights = random_weights(config.model)
    weights[name] = weights[name].copy()
    weights[name].flat[3] += 0.05
    perturbed = expect(config.model, weights, *random_batch(config))
    loss, gradients, _ = _one_layer()
    assert worst_distance(gradients, perturbed.gradients)[0] > 2 * TOLERANCE


_CACHE: "dict[str, tuple[float, dict[str, np.ndarray], float]]" = {}


def _one_layer() -> "tuple[float, dict[str, np.ndarray], float]":
    if "one layer" not in _CACHE:
        _CACHE["one layer"] = gradients_of(small(layers=1))
    return _CACHE["one layer"]
