"""A budget for activations decides what decoder blocks keep, and no bit of a number."""

from itertools import combinations_with_replacement

import numpy as np
import pytest
from popxl import extensions

from popxl_gpt.config.presets import override
from popxl_gpt.execution import block_graphs
from popxl_gpt.execution.block_graphs import kept_bytes, levels, stretches
from popxl_gpt.execution.overflow import layer_of_iteration
from popxl_gpt.execution.pretraining import training_program
from popxl_gpt.execution.recomputation import Stretch, bought, stretches_text
from tests.integration.architectures import MODELS
from tests.integration.runs import TRAINED, train

LAYERS = TRAINED.model.layers
LEVELS = levels(TRAINED)
MIDDLE = override(TRAINED, activation_memory=LEVELS[2].kept_bytes + 2 * LEVELS[3].kept_bytes)
"""With one block that keeps less than two others."""

LLAMA = {
    "norm": "rms_norm",
    "position_embedding": "rotary",
    "activation": "swiglu",
    "biases": False,
    "key_value_heads": 2,
    "qk_norm": True,
}
CASES = {
    "steps in one call": override(TRAINED, device_iterations=2),
    "float32, together": override(
        TRAINED, precision="float32", stochastic_rounding=False, widening=2
    ),
    "attention in pieces": override(TRAINED, attention_serialisation=4),
    "norms around, gains from one, GEGLU": override(
        TRAINED, **MODELS["norms around, gains from one, GEGLU"]
    ),
    "layers of three kinds": override(TRAINED, **MODELS["layers of three kinds"]),
    "Llama": override(TRAINED, **LLAMA, dropout=0.0),
    "adapters": override(TRAINED, lora_rank=4),
    "split every way": override(
        TRAINED, data_parallel=2, tensor_parallel_1=2, tensor_parallel_2=2, micro_batch_size=1
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_losses_norms_and_weights_are_those_of_recomputation_bit_for_bit(case, monkeypatch):
    """Each block of a run has another level, until all levels were there."""
    config = CASES[case]
    expected, weights = train(config)
    found, layers = levels(config)[1:], config.model.layers
    budgeted = override(config, activation_memory=1)
    for first in range(0, len(found), layers):
        chosen = [found[min(first + n, len(found) - 1)] for n in range(layers)]
        parts = tuple(Stretch(range(n, n + 1), level) for n, level in enumerate(chosen))
        monkeypatch.setattr(block_graphs, "bought", lambda *_, parts=parts: parts)
        results, trained = train(budgeted)
        assert results == expected
        for name, array in weights.items():
            np.testing.assert_array_equal(array, trained[name], err_msg=name)


def test_levels_lead_from_nothing_to_all_each_with_more_bytes_and_fewer_operations():
    assert [level.words for level in LEVELS] == [
        "nothing",
        "products but those of attention.qkv and feed_forward.up",
        "products but those of feed_forward.up",
        "products",
        "all",
    ]
    rows = 2 * 12  # of one micro-batch; two of them, in bfloat16
    widths = (0, 48, 4 * 48, 8 * 48)  # the sum after attention; queries, keys, values; wide layer
    assert [level.kept_bytes for level in LEVELS[:-1]] == [2 * rows * 2 * w for w in widths]
    assert LEVELS[-1].kept_bytes == kept_bytes(TRAINED) > LEVELS[-2].kept_bytes
    for less, more in zip(LEVELS, LEVELS[1:]):
        assert more.flops < less.flops
    up = 2 * rows * 48 * 192
    assert LEVELS[2].flops - LEVELS[3].flops == up + rows * 192  # and its bias


def test_a_budget_buys_the_fewest_operations_that_two_levels_have():
    for budget in range(1, LAYERS * kept_bytes(TRAINED) + 5000, 5000):
        found = bought(LEVELS, LAYERS, budget)
        assert [n for part in found for n in part.layers] == list(range(LAYERS))
        each = [part.level for part in found for _ in part.layers]
        others = [
            ways
            for ways in combinations_with_replacement(LEVELS, LAYERS)
            if len({*ways}) <= 2 and sum(level.kept_bytes for level in ways) <= budget
        ]
        assert sum(level.kept_bytes for level in each) <= budget
        least = min(sum(level.flops for level in ways) for ways in others)
        assert sum(level.flops for level in each) == pytest.approx(least)


def test_without_a_budget_blocks_keep_nothing_or_all():
    for config, words in ((TRAINED, "nothing"), (override(TRAINED, recomputation=False), "all")):
        assert [part.level.words for part in stretches(config)] == [words]


@pytest.mark.slow
def test_a_plan_shows_what_is_kept_within_the_budget_and_what_it_spares():
    configs = (TRAINED, MIDDLE, override(TRAINED, recomputation=False))
    plans = [extensions.plan(training_program(config)[0], with_peaks=False) for config in configs]
    runs = [{phase.name: phase.runs for phase in plan.phases} for plan in plans]
    for way in ("fwd", "bwd"):
        found = [
            tuple(of.get(f"decoder_{way}_{name}", 0) for name in ("phase", "keeping_phase"))
            for of in runs
        ]
        assert found == [(LAYERS, 0), (1, 2), (LAYERS, 0)]
    none, some, all_of_them = (plan.remote_memory_bytes for plan in plans)
    budget = MIDDLE.execution.activation_memory
    assert budget is not None
    assert 0.98 * budget < some - none < 1.02 * budget
    all_bytes = LAYERS * LEVELS[-1].kept_bytes
    assert 0.98 * all_bytes < all_of_them - none < 1.02 * all_bytes
    products = [sum(phase.product_flops for phase in plan.phases) for plan in plans]
    rows, hidden, wide = 2 * 2 * 12, 48, 192  # of both micro-batches
    spared = LAYERS * rows * 2 * hidden * (hidden + 3 * hidden) + 2 * rows * 2 * hidden * wide
    assert products[0] - products[1] == spared
    text = (
        "1 block keeps products but those of feed_forward.up, 18.0 KiB each; 2 blocks keep products"
    )
    assert stretches_text(stretches(MIDDLE)) == f"{text}, 36.0 KiB each"


@pytest.mark.parametrize(
    ("phase", "layers"),
    [
        ("decoder_fwd_phase", [0]),
        ("decoder_fwd_keeping_phase", [1, 2]),
        ("decoder_optim_fwd_keeping_phase", [1, 2]),
        ("decoder_bwd_keeping_phase", [2, 1]),
        ("decoder_bwd_phase", [0]),
        ("decoder_optim_phase", [0, 1, 2]),
    ],
)
def test_messages_name_the_layer_of_a_round(phase, layers):
    numbers = range(2 * len(layers))  # of two steps
    assert [layer_of_iteration(phase, number, MIDDLE) for number in numbers] == 2 * layers
