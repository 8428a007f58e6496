"""Micro-batches that run as one give the numbers that they give one by one, dropout included."""

import functools

import numpy as np
import popxl_addons as addons
import pytest
from helpers.quick import cases
from popxl.extensions import stack_seeds

from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.block_graphs import activation_spec, words_spec
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.saved_state import Position
from popxl_gpt.execution.checkpoints.saving import save
from popxl_gpt.execution.host import run_steps
from popxl_gpt.execution.pretraining import pretraining, training_program
from popxl_gpt.execution.variables import read_weights
from tests.integration.gpt_oracle import random_batch, small
from tests.integration.runs import gradients_of, train, worst_distance

TOLERANCE = 1e-6
DROPPING = small(dropout=0.3, heads=4, micro_batch_size=2, global_batch_size=8)
SPLIT = {"data_parallel": 2, "tensor_parallel_1": 2, "tensor_parallel_2": 2, "micro_batch_size": 1}
CASES = {
    "dropout": DROPPING,
    "no dropout": override(DROPPING, dropout=0.0),
    "no recomputation": override(DROPPING, recomputation=False),
    "no dropout, no recomputation": override(DROPPING, dropout=0.0, recomputation=False),
    "attention in pieces": override(DROPPING, attention_serialisation=4),
    "attention in pieces, no recomputation": override(
        DROPPING, attention_serialisation=4, recomputation=False
    ),
    "loss scaling, clipping": override(DROPPING, loss_scaling=512.0, max_norm=0.01),
    "overlapped transfers": override(DROPPING, io_mode="io_overlapped"),
    "data parallel": override(DROPPING, data_parallel=2, micro_batch_size=1),
    "split heads and padded vocabulary": override(DROPPING, tensor_parallel_1=2),
    "split hidden size": override(DROPPING, tensor_parallel_2=2),
    "split every way": override(DROPPING, **SPLIT),
    "split every way, whole": override(DROPPING, **SPLIT, replicated_tensor_sharding=False),
}
"""Each with four micro-batches per replica."""


@functools.cache
def one_by_one(case: str) -> "tuple[float, dict[str, np.ndarray], float]":
    return gradients_of(CASES[case])


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("widening", [2, 4])
@pytest.mark.parametrize("case", cases(CASES, lambda case: case == "dropout"))
def test_loss_and_every_gradient_are_those_of_micro_batches_one_by_one(case, widening):
    config = override(CASES[case], widening=widening)
    assert config.gradient_accumulation == 4 and config.runs_per_phase == 4 // widening
    (loss, gradients, norm), (expected_loss, expected, expected_norm) = (
        gradients_of(config),
        one_by_one(case),
    )
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    assert norm == pytest.approx(expected_norm, rel=TOLERANCE)
    worst = worst_distance(gradients, expected)
    assert worst[0] < TOLERANCE, worst


@pytest.mark.slow
def test_more_micro_batches_than_the_host_keeps_seeds_for_run_as_one():
    config = override(DROPPING, micro_batch_size=1, global_batch_size=12)
    gradients, expected = gradients_of(override(config, widening=12))[1], gradients_of(config)[1]
    assert worst_distance(gradients, expected)[0] < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        lambda seeds: stack_seeds([seeds[0]] * len(seeds)),
        lambda seeds: stack_seeds(seeds[::-1]),
        lambda seeds: stack_seeds([seeds[0], *seeds[:-1]]),
    ],
    ids=["one seed for all", "in another order", "each its neighbour's"],
)
def test_seeds_that_are_not_those_of_the_micro_batches_are_noticed(wrong, monkeypatch):
    monkeypatch.setattr(addons.transforms.serial_steps, "stack_seeds", wrong)
    gradients = gradients_of(override(DROPPING, widening=4))[1]
    assert worst_distance(gradients, one_by_one("dropout")[1])[0] > 1000 * TOLERANCE


@pytest.mark.slow
def test_recomputation_changes_no_bit_of_any_gradient():
    config = override(DROPPING, widening=2)
    kept, again = (
        gradients_of(override(config, recomputation=is_on))[1] for is_on in (False, True)
    )
    for name, array in kept.items():
        np.testing.assert_array_equal(array, again[name], err_msg=name)


@pytest.mark.slow
def test_a_widened_program_is_one_of_larger_micro_batches():
    config = override(DROPPING, widening=2)
    wide = override(DROPPING, micro_batch_size=4)
    assert activation_spec(config) == activation_spec(wide) and words_spec(config) == words_spec(
        wide
    )
    found, expected = (training_program(c)[1] for c in (config, wide))
    assert [buffer.entries for buffer in found.buffers.values()] == [
        b.entries for b in expected.buffers.values()
    ]
    assert found.inputs.words.shape == expected.inputs.words.shape


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"device_iterations": 2}, {"data_parallel": 2, "micro_batch_size": 1}], ids=str
)
def test_steps_of_training_have_the_losses_of_micro_batches_one_by_one(changes):
    config = override(
        DROPPING, **changes, steps=4, learning_rate=3e-3, max_norm=0.5, weight_decay=0.2
    )
    losses, wide = ([step.loss for step in train(override(config, widening=w))[0]] for w in (1, 4))
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(wide, losses, rtol=1e-5)


def losses_of(session: addons.TaskSession, config: Config, steps: range) -> "list[float]":
    with session:
        return [
            run_steps(session, config, *random_batch(config, step), [1e-3])[0].loss
            for step in steps
        ]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("before, after", [(1, 4), (4, 2), (2, 1)])
def test_a_checkpoint_loads_with_another_width(before, after, tmp_path, caplog):
    config, other = (override(DROPPING, widening=widening) for widening in (before, after))
    session = pretraining(config)
    losses_of(session, config, range(2))
    saved = save(session, config, tmp_path, Position(2, "data"))
    going_on = pretraining(other)
    SavedRun(saved, other).restore(going_on)
    assert (
        f"continuing with other settings: execution.widening: {before} -> {after}." in caplog.text
    )
    for name, array in read_weights(session, config).items():
        np.testing.assert_array_equal(read_weights(going_on, other)[name], array, err_msg=name)
    expected = losses_of(session, config, range(2, 5))
    np.testing.assert_allclose(losses_of(going_on, other, range(2, 5)), expected, rtol=1e-5)
