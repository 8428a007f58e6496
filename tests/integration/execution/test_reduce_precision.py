"""`--reduce_precision bfloat16`: gradients that travel in 16 bits and are summed in float32."""

from typing import Any

import numpy as np
import pytest
from helpers.quick import cases

from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.host import run_steps
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.variables import read_gradients, write_whole_weights
from tests.integration.execution.plan_cases import planned_work
from tests.integration.gpt_oracle import random_batch, random_weights, small
from tests.integration.runs import train

BASE = small(
    hidden_size=16, heads=4, sequence_length=6, max_positions=7, tied_head=False, micro_batch_size=1
)
NARROW = {"reduce_precision": "bfloat16"}


def gradients(config: Config, words: np.ndarray, labels: np.ndarray) -> "dict[str, np.ndarray]":
    """The rows of gradients after a step on one global batch that changes no weight."""
    session = pretraining(config)
    write_whole_weights(session, config, random_weights(config.model).items())
    with session:
        run_steps(session, config, words, labels, [0.0])
    return read_gradients(session, config)


def nearest(x: np.ndarray) -> np.ndarray:
    """float32 numbers to the nearest of bfloat16, ties to the even one."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def mean(parts: "list[np.ndarray]") -> np.ndarray:
    """The mean in float32, added by a binary tree over replicas."""
    count = len(parts)
    while len(parts) > 1:
        pairs = [a + b for a, b in zip(parts[::2], parts[1::2])]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0] / np.float32(count)


LAYOUTS: "list[dict[str, Any]]" = [
    {"data_parallel": 2},
    {"data_parallel": 3, "replicated_tensor_sharding": False},
    {"data_parallel": 4, "precision": "bfloat16", "master_weights": True},
    {"data_parallel": 2, "tensor_parallel_1": 2},
    {"data_parallel": 2, "tensor_parallel_2": 2},
    {"data_parallel": 2, "tensor_parallel_1": 2, "tensor_parallel_2": 2},
]


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("changes", cases(LAYOUTS, lambda changes: len(changes) == 1), ids=str)
def test_rows_are_float32_means_of_gradients_that_each_replica_rounds(changes):
    dp = changes["data_parallel"]
    config = override(BASE, **changes, global_batch_size=dp)
    words, labels = random_batch(config)
    alone = override(config, data_parallel=1, global_batch_size=1)
    own = [gradients(alone, words[i : i + 1], labels[i : i + 1]) for i in range(dp)]
    wide, narrow = (gradients(c, words, labels) for c in (config, override(config, **NARROW)))
    for name, x in wide.items():
        np.testing.assert_array_equal(x, mean([each[name] for each in own]), err_msg=name)
        expected = mean([nearest(each[name]) for each in own])
        np.testing.assert_array_equal(narrow[name], expected, err_msg=name)


def test_without_data_parallelism_nothing_is_rounded():
    config = override(BASE, global_batch_size=1)
    batch = random_batch(config)
    wide, narrow = (gradients(c, *batch) for c in (config, override(config, **NARROW)))
    for name, x in wide.items():
        np.testing.assert_array_equal(narrow[name], x, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(4, 1, 1), (2, 2, 2)], ids=str)
def test_sharding_and_groups_of_layers_change_no_bit_of_a_run(grid):
    sizes = dict(zip(("data_parallel", "tensor_parallel_1", "tensor_parallel_2"), grid))
    config = override(BASE, **sizes, **NARROW, global_batch_size=8, steps=4, max_norm=0.0)
    results, weights = train(config)
    for changes in ({"replicated_tensor_sharding": False}, {"recomputation": False}):
        others, other_weights = train(override(config, **changes))
        assert [r.loss for r in others] == [r.loss for r in results]
        for name, array in weights.items():
            np.testing.assert_array_equal(other_weights[name], array, err_msg=name)


@pytest.mark.slow
def test_a_run_is_near_the_one_whose_gradients_travel_in_32_bits():
    config = override(BASE, data_parallel=4, global_batch_size=4, steps=30, learning_rate=3e-3)
    (wide, _), (narrow, _) = (train(c) for c in (config, override(config, **NARROW)))
    losses = [[result.loss for result in results] for results in (wide, narrow)]
    assert losses[0] != losses[1] and losses[0][-1] < 0.9 * losses[0][0]
    np.testing.assert_allclose(*losses, rtol=2e-3)


def sent(config: Config) -> "dict[str, int]":
    """Bytes that each kind of collective sends in a step."""
    found: dict[str, int] = {}
    for phase in planned_work(config).program.phases:
        for c in phase.collectives:
            found[c.op] = found.get(c.op, 0) + c.sent_bytes
    return found


@pytest.mark.slow
def test_the_plan_has_half_the_bytes_of_gradients_on_the_links():
    config = override(BASE, data_parallel=2, global_batch_size=4)
    wide, narrow = sent(config), sent(override(config, **NARROW))
    assert wide.pop("replicated_reduce_scatter") == 2 * narrow.pop("wide_reduce_scatter") > 0
    assert wide == narrow, "weights are gathered, and a norm is summed, as ever"
    whole = override(config, replicated_tensor_sharding=False)
    wide, narrow = sent(whole), sent(override(whole, **NARROW))
    of_gradients = wide["replicated_all_reduce"] - narrow["replicated_all_reduce"]
    # half of the way there, and all of the way back
    assert 4 * narrow["wide_all_reduce"] == 3 * of_gradients > 0
