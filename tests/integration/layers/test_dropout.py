"""What dropout drops on each replica: looked at, and its gradients against a formula that is given
the whole masks.

Hidden masks agree over tp1 and differ over tp2 and dp. Attention masks agree over tp2 and differ
over tp1 and dp.
"""

import dataclasses

import numpy as np
import popxl
import popxl_addons as addons
import pytest
import torch
from helpers.quick import cases
from popxl import ops
from popxl.extensions import stack_seeds

from popxl_gpt.config.schema import Execution, Model
from popxl_gpt.modelling.layout import Layout
from tests.integration.layers.cases import CASES
from tests.integration.layers.running import (
    MODEL,
    check_equal,
    expected_outcome,
    run_layer,
    same,
    show_dropped,
    split_hidden,
    table_of,
    whole_hidden,
)

DROPOUT = 0.25
LARGE = Model(
    layers=1,
    hidden_size=64,
    heads=4,
    sequence_length=40,
    max_positions=40,
    vocabulary_size=37,
    dropout=DROPOUT,
)
CAUSAL = np.tril(np.ones((LARGE.sequence_length, LARGE.sequence_length), bool))
AGREEMENT = DROPOUT**2 + (1 - DROPOUT) ** 2
"""Share of units on which two independent masks agree. Of the smallest compared, 1600 units, a
deviation is 0.012.
"""


def masks_of(
    name: str, dp: int, tp1: int, tp2: int, seed: int = 7, children: "tuple[int, ...]" = ()
) -> "list[np.ndarray]":
    """Which units stay in each of a layer's dropouts, bool [dp, tp1, tp2, ...]; attention's up to
    the query only.

    Args:
        children: the children of the seed from which so many micro-batches, of a sequence each,
            draw; none: there is one, which draws from the seed itself.
    """
    rows = LARGE.sequence_length * max(1, len(children))
    ir = popxl.Ir(replication=dp * tp1 * tp2)
    generator = np.random.default_rng(0)
    with ir.main_graph:
        layout = Layout.of(
            ir,
            Execution(
                data_parallel=dp, tensor_parallel_1=tp1, tensor_parallel_2=tp2, micro_batch_size=1
            ),
        )
        layer = CASES[name].layer(LARGE, layout)
        if name == "embedding":
            x = popxl.variable(generator.integers(0, LARGE.vocabulary_size, rows).astype(np.int32))
        else:
            whole = generator.standard_normal((rows, LARGE.hidden_size)).astype(np.float32)
            pieces = np.concatenate([split_hidden(whole, tp1, tp2)] * dp)
            grouping = ir.replica_grouping(group_size=1)
            x = popxl.variable(pieces if len(pieces) > 1 else pieces[0], replica_grouping=grouping)
        _, seed_tensor = addons.seed_variable(seed, layout.tp)
        if children:
            drawn = [
                ops.split_random_seed(seed_tensor, 1 + max(children))[child] for child in children
            ]
            seed_tensor = drawn[0] if len(drawn) == 1 else stack_seeds(drawn)
        factories, fwd = layer.create_graph(x, seed_tensor)
        count = show_dropped(fwd.graph)
        variables = factories.init()
        streams = []
        for t in fwd.bind(variables).call(x, seed_tensor)[1 : 1 + count]:
            streams.append(popxl.d2h_stream(t.shape, t.dtype))
            ops.host_store(streams[-1], t)
    session = popxl.Session(ir, "cpu")
    weights = {
        key: 0.1 * generator.standard_normal(entry.shape) for key, entry in layer.table.items()
    }
    session.write_variables_data(
        {
            variables[key]: layer.table[key].shard(array, tp1, tp2).astype(np.float32)
            for key, array in weights.items()
        }
    )
    with session:
        results = session.run()
    kept = [results[stream].reshape(dp, tp1, tp2, *stream.shape) != 0 for stream in streams]
    return [mask[..., CAUSAL] if mask.shape[-2:] == CAUSAL.shape else mask for mask in kept]


def agreement(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.mean(one == other))


HIDDEN = {"embedding": [0], "decoder": [1, 2]}
"""Dropouts of hidden units, by number within the layer. The block's first one is attention's."""


@pytest.fixture(scope="module")
def masks() -> "dict[str, list[np.ndarray]]":
    return {name: masks_of(name, 2, 2, 2) for name in HIDDEN}


@pytest.mark.parametrize(
    "name, number", [(name, number) for name, numbers in HIDDEN.items() for number in numbers]
)
def test_hidden_masks_agree_over_tp1_and_differ_over_tp2_and_dp(masks, name, number):
    mask = masks[name][number]
    assert mask.shape == (2, 2, 2, LARGE.sequence_length, LARGE.hidden_size // 2)
    np.testing.assert_array_equal(mask[:, 0], mask[:, 1])
    assert agreement(mask[:, 0, 0], mask[:, 0, 1]) == pytest.approx(AGREEMENT, abs=0.04)
    assert agreement(mask[0], mask[1]) == pytest.approx(AGREEMENT, abs=0.04)
    assert np.mean(~mask) == pytest.approx(DROPOUT, abs=0.03)


def test_attention_masks_agree_over_tp2_and_differ_over_tp1_and_dp(masks):
    mask = masks["decoder"][0]
    assert mask.shape == (2, 2, 2, 1, LARGE.heads // 2, CAUSAL.sum())
    np.testing.assert_array_equal(mask[:, :, 0], mask[:, :, 1])
    assert agreement(mask[:, 0, 0], mask[:, 1, 0]) == pytest.approx(AGREEMENT, abs=0.04)
    assert agreement(mask[0], mask[1]) == pytest.approx(AGREEMENT, abs=0.04)
    assert np.mean(~mask) == pytest.approx(DROPOUT, abs=0.03)


def test_the_dropouts_of_a_block_differ_from_each_other(masks):
    _, first, second = masks["decoder"]
    assert agreement(first, second) == pytest.approx(AGREEMENT, abs=0.03)


def test_another_seed_drops_other_units():
    for first, second in zip(masks_of("decoder", 1, 1, 1), masks_of("decoder", 1, 1, 1, seed=8)):
        assert agreement(first, second) == pytest.approx(AGREEMENT, abs=0.04)


@pytest.mark.parametrize("name", HIDDEN)
def test_micro_batches_that_run_as_one_drop_the_units_that_each_drops_alone(name):
    together = masks_of(name, 2, 2, 2, children=(0, 1, 2))
    alone = [masks_of(name, 2, 2, 2, children=(child,)) for child in range(3)]
    for mask, *parts in zip(together, *alone):
        np.testing.assert_array_equal(mask, np.concatenate(parts, axis=3))
        assert agreement(parts[0], parts[1]) == pytest.approx(AGREEMENT, abs=0.04)


def test_units_that_stay_are_scaled_so_that_the_mean_stays():
    outcome = run_layer(
        CASES["embedding"], dataclasses.replace(MODEL, dropout=DROPOUT), 1, 1, seed=7
    )
    plain = run_layer(CASES["embedding"], MODEL, 1, 1).value
    scale = np.where(outcome.value == 0, 0, 1 / (1 - DROPOUT))
    np.testing.assert_allclose(outcome.value, plain * scale, rtol=1e-6)


@pytest.mark.parametrize(
    "split", cases([(1, 1), (2, 1), (1, 2), (2, 2), (4, 4)], lambda split: split == (2, 2))
)
def test_a_block_that_drops_units_equals_its_formula_with_the_masks_put_together(split):
    model = dataclasses.replace(MODEL, dropout=DROPOUT)
    case = CASES["decoder"]
    outcome = run_layer(case, model, *split, seed=11)
    attention, *hidden = ((dropped != 0) / (1 - DROPOUT) for dropped in outcome.dropped)
    # [B, heads, S, S], identical over tp2
    over_heads = np.concatenate([same(pieces) for pieces in attention], axis=1)
    keep = [torch.from_numpy(mask) for mask in (over_heads, *map(whole_hidden, hidden))]
    check_equal(outcome, expected_outcome(case, model, table_of(case, model), keep=keep))
