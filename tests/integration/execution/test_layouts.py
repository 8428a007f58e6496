"""The numbers of a run do not depend on its layout: replicas, replicated tensor sharding,
recomputation.

Float32, no dropout, every parameter at random. Processes are in test_processes.py.
"""

import functools

import numpy as np
import pytest
from helpers.quick import cases

from popxl_gpt.config.presets import override, preset
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.host import StepResult
from tests.integration.gpt_oracle import small
from tests.integration.runs import gradients_of, train, worst_distance

Grid = "tuple[int, int, int]"
"""(dp, tp1, tp2)."""
SMALL = small(hidden_size=16, heads=4, sequence_length=6, max_positions=7, global_batch_size=4)
GRIDS = [
    *((1, 2, 2), (1, 4, 2), (1, 4, 4), (2, 1, 2), (2, 2, 2), (2, 2, 4), (2, 4, 1)),
    *((4, 1, 2), (4, 1, 4), (4, 2, 1), (4, 4, 4)),
]
"""Every two sizes, of 1, 2 and 4, of every two groups; those of one group are trained by
`tests/same_numbers`.
"""


def laid_out(config: Config, grid: Grid, **changes: object) -> Config:
    """The configuration on dp x tp1 x tp2 replicas, with two micro-batches a step, or with one where
    each replica has one sequence.
    """
    names = ("data_parallel", "tensor_parallel_1", "tensor_parallel_2")
    size = max(1, config.training.global_batch_size // grid[0] // 2)
    return override(config, **dict(zip(names, grid)), micro_batch_size=size, **changes)


# Gradients


of_one_replica = functools.cache(gradients_of)
"""As `gradients_of`, of a configuration that several layouts are compared with."""


def check_same(
    found: "tuple[float, dict[str, np.ndarray], float]", expected: "tuple[float, dict, float]"
) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    worst = worst_distance(found[1], expected[1])
    assert worst[0] < 1e-5, worst
    assert found[2] == pytest.approx(expected[2], rel=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("grid", cases(GRIDS, lambda grid: grid == (2, 2, 2)))
def test_loss_and_gradients_are_those_of_one_replica(grid):
    check_same(gradients_of(laid_out(SMALL, grid)), of_one_replica(SMALL))


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(1, 2, 2), (2, 4, 1)], ids=str)
def test_a_padded_vocabulary_changes_nothing(grid):
    whole = override(SMALL, vocabulary_size=50257, layers=1, global_batch_size=2)
    assert whole.model.vocabulary_size % grid[1]
    check_same(gradients_of(laid_out(whole, grid)), of_one_replica(whole))


SIZES = {"hidden_size": 20, "sequence_length": 5, "global_batch_size": 6}
ODD = override(SMALL, **SIZES)
"""Neither weights nor activations divide evenly over groups of three or four."""
ODD_GRIDS = cases([(3, 1, 1), (1, 4, 2), (3, 4, 2)], lambda grid: grid == (3, 1, 1))


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("grid", ODD_GRIDS)
def test_shards_that_are_padded_change_nothing(grid):
    check_same(gradients_of(laid_out(ODD, grid)), of_one_replica(ODD))


# Training

TRAINED = override(
    SMALL,
    steps=10,
    learning_rate=3e-3,
    schedule="cosine",
    warmup_steps=2,
    weight_decay=0.2,
    max_norm=0.5,
)
TRAINED_GRIDS = [(2, 4, 1), (1, 2, 4), (1, 4, 2)]
"""Those that `tests/same_numbers` does not train."""


def losses(results: "list[StepResult]") -> "list[float]":
    return [result.loss for result in results]


@pytest.fixture(scope="module")
def trained_alone() -> "list[StepResult]":
    """Ten steps on a single replica."""
    results, _ = train(TRAINED)
    assert any(result.gradient_norm > TRAINED.training.max_norm for result in results), (
        "clipping is active"
    )
    return results


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("grid", TRAINED_GRIDS, ids=str)
def test_ten_steps_have_the_losses_of_one_replica(grid, trained_alone):
    results, _ = train(laid_out(TRAINED, grid))
    np.testing.assert_allclose(losses(results), losses(trained_alone), rtol=1e-4)


def check_bitwise(config: Config, one: "dict[str, object]", other: "dict[str, object]") -> None:
    (first, first_weights), (second, second_weights) = (
        train(override(config, **changes)) for changes in (one, other)
    )
    assert losses(first) == losses(second)
    for name, array in first_weights.items():
        np.testing.assert_array_equal(array, second_weights[name], err_msg=name)


BITWISE_GRIDS = [(1, 2, 2), (4, 1, 1), (2, 2, 2)]
SHARDED, WHOLE = {"replicated_tensor_sharding": True}, {"replicated_tensor_sharding": False}


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("max_norm", [0.0, 1e3], ids=["without clipping", "never clipped"])
@pytest.mark.parametrize("grid", BITWISE_GRIDS)
def test_replicated_tensor_sharding_changes_no_bit_where_nothing_is_clipped(grid, max_norm):
    check_bitwise(laid_out(TRAINED, grid, steps=3, max_norm=max_norm), SHARDED, WHOLE)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("grid", BITWISE_GRIDS)
def test_replicated_tensor_sharding_changes_clipped_steps_by_rounding_of_the_norm_alone(grid):
    config = laid_out(TRAINED, grid, steps=3, max_norm=0.01)
    sharded, whole = (train(override(config, **changes))[0] for changes in (SHARDED, WHOLE))
    assert all(result.gradient_norm > config.training.max_norm for result in whole)
    np.testing.assert_allclose(losses(sharded), losses(whole), rtol=1e-6)
    norms = ([result.gradient_norm for result in results] for results in (sharded, whole))
    np.testing.assert_allclose(*norms, rtol=1e-6)


@pytest.mark.slow
def test_padded_shards_change_no_bit():
    check_bitwise(
        laid_out(override(TRAINED, **SIZES), (3, 1, 1), steps=3, max_norm=0.0), SHARDED, WHOLE
    )


NARROW = {
    "moment_precision": "bfloat16", "gradient_precision": "bfloat16", "stochastic_rounding": True,
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("grid", BITWISE_GRIDS)
def test_shards_of_moments_and_gradients_in_bfloat16_round_as_whole_ones(grid):
    check_bitwise(laid_out(TRAINED, grid, steps=4, max_norm=0.0, **NARROW), SHARDED, WHOLE)


EIGHT_BIT_MOMENTS = {"moment_precision": "8bit", "stochastic_rounding": True}


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(1, 2, 2), (2, 2, 2)])
def test_shards_of_moments_in_8_bits_round_as_whole_ones_but_for_the_smallest(grid):
    """Shards have blocks of their own: a number that is small beside others of its block is rounded
    to other steps. (Shards of whole blocks change no bit: see the runtime's tests.)
    """
    config = laid_out(TRAINED, grid, steps=6, max_norm=0.0, **EIGHT_BIT_MOMENTS)
    (sharded, weights), (whole, others) = (
        train(override(config, **changes)) for changes in (SHARDED, WHOLE)
    )
    np.testing.assert_allclose(losses(sharded), losses(whole), rtol=1e-6)
    for name, array in weights.items():
        # a key's bias has rounding errors for a gradient, which Adam scales up
        if not name.endswith("qkv.bias"):
            np.testing.assert_allclose(array, others[name], rtol=1e-3, atol=1e-3, err_msg=name)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("grid", BITWISE_GRIDS)
def test_recomputation_changes_no_bit(grid):
    check_bitwise(
        laid_out(TRAINED, grid, steps=3), {"recomputation": True}, {"recomputation": False}
    )


# The small preset


@functools.cache
def trained(config: Config) -> "list[StepResult]":
    """The steps of one replica, which several layouts are compared with."""
    return train(config)[0]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "grid, changes",
    [
        pytest.param((2, 2, 2), {}, id="8 replicas"),
        pytest.param((4, 4, 4), {}, id="64 replicas"),
        pytest.param((4, 8, 8), {"heads": 8, "layers": 1}, id="256 replicas"),
    ],
)
def test_the_smallest_preset_trains_in_one_process(grid, changes):
    config = preset("tiny", steps=2, learning_rate=1e-2, **changes)
    results, _ = train(override(laid_out(config, grid), micro_batch_size=8 // grid[0]))
    assert losses(results)[-1] < losses(results)[0]
    np.testing.assert_allclose(
        losses(results), losses(trained(laid_out(config, (1, 1, 1)))), rtol=1e-4
    )


def test_the_smallest_preset_is_split_in_all_three_ways():
    execution = preset("tiny").execution
    assert (execution.data_parallel, execution.tensor_parallel_1, execution.tensor_parallel_2) == (
        2,
        2,
        2,
    )
    assert execution.replication_factor == 8
