"""Micro-batches in groups, each of which runs through all layers, give the numbers of all at once:
the same bits on one replica.
"""

import functools

import numpy as np
import pytest
from helpers.quick import cases

from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.inference.inference import evaluate, evaluation
from popxl_gpt.execution.planning.memory import state_bytes
from popxl_gpt.execution.pretraining import training_program
from popxl_gpt.execution.variables import write_whole_weights
from popxl_gpt.utils.errors import ConfigError
from popxl_gpt.utils.runtime import planner
from tests.integration.gpt_oracle import random_batch, random_weights, small
from tests.integration.runs import TRAINED, gradients_of, train, worst_distance

DROPPING = small(dropout=0.3, heads=4, micro_batch_size=1, global_batch_size=8)
ALONE = {
    "dropout": {},
    "no recomputation": {"recomputation": False},
    "two at a time": {"widening": 2},
    "head in pieces": {"head_serialisation": 3},
    "tied head": {"tied_head": True},
    "some layers keep": {"activation_memory": 30_000},
    "kinds of layers": {"layer_pattern": ("sliding", "full"), "window": 5, "layers": 3},
    "replicas that share nothing": {"tensor_parallel_1": 2, "replicated_tensor_sharding": False},
}
"""Gradients that wait for the next group as they are added up."""
REDUCED = {
    "data parallel": {"data_parallel": 2},
    "split every way": {"data_parallel": 2, "tensor_parallel_1": 2, "tensor_parallel_2": 2},
    "split every way, tied": {"data_parallel": 2, "tensor_parallel_1": 2, "tied_head": True},
}
"""Gradients that replicas reduce after each group."""


@functools.cache
def at_once(case: str) -> "tuple[float, dict[str, np.ndarray], float]":
    return gradients_of(override(DROPPING, **{**ALONE, **REDUCED}[case]))


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("case", cases(ALONE, lambda case: case == "dropout"))
def test_loss_and_every_gradient_have_the_bits_of_all_micro_batches_at_once(case, group):
    config = override(DROPPING, **ALONE[case])
    if group % config.execution.widening:
        group = 4
    (loss, gradients, norm), (expected_loss, expected, expected_norm) = (
        gradients_of(override(config, micro_batch_group=group)),
        at_once(case),
    )
    assert (loss, norm) == (expected_loss, expected_norm)
    for name, array in expected.items():
        np.testing.assert_array_equal(gradients[name], array, err_msg=name)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("case", REDUCED)
def test_gradients_that_replicas_reduce_differ_by_rounding(case, group):
    config = override(DROPPING, **REDUCED[case], micro_batch_group=group)
    (loss, gradients, norm), (expected_loss, expected, expected_norm) = (
        gradients_of(config),
        at_once(case),
    )
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert norm == pytest.approx(expected_norm, rel=1e-6)
    assert worst_distance(gradients, expected)[0] < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"data_parallel": 2, "tied_head": True}], ids=str)
def test_gradients_in_16_bits_are_rounded_for_each_group_by_itself(changes):
    config = override(DROPPING, **changes, precision="bfloat16", stochastic_rounding=True)
    wide = gradients_of(override(config, micro_batch_group=1))
    narrow = gradients_of(override(config, micro_batch_group=1, gradient_precision="bfloat16"))
    assert narrow[0] == wide[0]
    assert narrow[2] == pytest.approx(wide[2], rel=1e-3)
    for name, array in wide[1].items():
        error = (narrow[1][name] - array).ravel()
        steps = np.abs(array).max() * 2.0**-7
        assert np.abs(error).max() < 4 * steps, name
        # of eight roundings, the same draws would add up to one side
        assert abs(error.mean()) < steps * max(0.1, 2 / error.size**0.5), name


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"device_iterations": 2},
        {"optimizer": "muon", "tied_head": True},
        {"lora_rank": 3},
        {"in files": True, "device_iterations": 2},
        {"device_memory": 480_000},
    ],
    ids=str,
)
def test_training_comes_to_the_same_weights(changes, tmp_path):
    if changes.pop("in files", False):
        changes |= {"memmap_dir": str(tmp_path), "host_memory": 320_000}
    config = override(TRAINED, micro_batch_size=1, **changes)
    (expected, weights), (found, grouped) = (
        train(override(config, micro_batch_group=group)) for group in (None, 2)
    )
    assert found == expected and found[-1].loss < found[0].loss
    for name, array in weights.items():
        np.testing.assert_array_equal(grouped[name], array, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"data_parallel": 2, "tensor_parallel_1": 2}], ids=str)
def test_evaluation_runs_in_groups_as_training_does(changes):
    config, losses = override(DROPPING, **changes), []
    for group in (None, 1, 2):
        own = override(config, micro_batch_group=group)
        session = evaluation(own)
        write_whole_weights(session, own, random_weights(own.model).items())
        with session:
            losses.append(evaluate(session, own, *random_batch(own)))
        assert session.ir.num_host_transfers == own.runs_per_step
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.slow
def test_validation_by_other_micro_batches_runs_all_of_them():
    config = override(DROPPING, global_batch_size=10, inference_micro_batch_size=2)
    losses = []
    for group in (None, 2):
        own = override(config, micro_batch_group=group)
        session = evaluation(own)
        write_whole_weights(session, own, random_weights(own.model).items())
        with session:
            losses.append(evaluate(session, own, *random_batch(own)))
    assert losses[0] == losses[1]
    runs = override(config, micro_batch_group=2).in_inference
    assert (runs.groups, runs.runs_per_phase) == (5, 1)  # 2 do not divide 5


@pytest.mark.slow
def test_activations_of_one_group_are_kept_at_a_time():
    def rows(config: Config) -> int:
        ir = training_program(config)[0]
        return int(planner().plan(ir, with_peaks=False).remote_memory_bytes)

    config = override(DROPPING, sequence_length=16, recomputation=False, global_batch_size=64)
    whole, halves, quarters = (rows(override(config, micro_batch_group=n)) for n in (None, 32, 16))
    # what is left beside activations: the word embedding's gradient waits, too, in any case
    assert whole - halves == pytest.approx(2 * (halves - quarters), rel=0.01)
    least = [state_bytes(override(config, micro_batch_group=n)) for n in (None, 32)]
    assert least[1] < least[0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"micro_batch_group": 3}, "micro_batch_group: got 3; expected a divisor of .* = 8. Use 1"),
        ({"micro_batch_group": 3, "widening": 2}, "a multiple of widening = 2.* Use 2 or 4"),
        (
            {"micro_batch_group": 4, "rampup_batch_size": 6, "rampup_increment": 2,
             "rampup_tokens": 1000},
            "a step of 6 sequences.* = 6. Use 2",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_groups_that_do_not_make_a_batch_are_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        override(DROPPING, **changes)
    fewer_than_a_group = override(DROPPING, micro_batch_group=64)
    assert fewer_than_a_group.groups == 1
