"""A budget for activations decides how many decoder blocks keep theirs, and no bit of a number."""

import numpy as np
import pytest
from popxl import extensions

from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.layer_graphs import kept_bytes, kept_layers
from popxl_gpt.execution.overflow import layer_of_iteration
from popxl_gpt.execution.pretraining import training_program
from tests.integration.architectures import MODELS
from tests.integration.runs import TRAINED, train

LAYERS = TRAINED.model.layers
BYTES = kept_bytes(TRAINED)


def kept(config: Config, layers: int) -> Config:
    """With a budget that just holds what so many layers keep."""
    return override(config, activation_memory=layers * kept_bytes(config))


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
    "split every way": override(
        TRAINED, data_parallel=2, tensor_parallel_1=2, tensor_parallel_2=2, micro_batch_size=1
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_losses_norms_and_weights_are_those_of_recomputation_bit_for_bit(case):
    config = CASES[case]
    (expected, weights), *others = (
        train(c) for c in (config, kept(config, 1), kept(config, LAYERS - 1))
    )
    for results, found in others:
        assert results == expected
        for name, array in weights.items():
            np.testing.assert_array_equal(array, found[name], err_msg=name)


def test_as_many_layers_keep_theirs_as_the_budget_holds():
    budgets = (1, BYTES - 1, BYTES, 2 * BYTES + 1, 100 * BYTES)
    found = [kept_layers(override(TRAINED, activation_memory=budget)) for budget in budgets]
    assert found == [0, 0, 1, 2, LAYERS]
    assert (kept_layers(TRAINED), kept_layers(override(TRAINED, recomputation=False))) == (
        0,
        LAYERS,
    )


@pytest.mark.slow
def test_a_plan_shows_who_keeps_and_that_what_is_kept_is_within_the_budget():
    plans = [
        extensions.plan(training_program(config)[0], with_peaks=False)
        for config in (TRAINED, kept(TRAINED, 2), override(TRAINED, recomputation=False))
    ]
    runs = [{phase.name: phase.runs for phase in plan.phases} for plan in plans]
    for way in ("fwd", "bwd"):
        found = [
            tuple(of.get(f"decoder_{way}_{name}", 0) for name in ("phase", "keeping_phase"))
            for of in runs
        ]
        assert found == [(LAYERS, 0), (LAYERS - 2, 2), (LAYERS, 0)]
    none, some, all_of_them = (plan.remote_memory_bytes for plan in plans)
    assert 0.98 * 2 * BYTES < some - none < 1.02 * 2 * BYTES
    assert 0.98 * LAYERS * BYTES < all_of_them - none < 1.02 * LAYERS * BYTES


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
    config = kept(TRAINED, 2)
    numbers = range(2 * len(layers))  # of two steps
    assert [layer_of_iteration(phase, number, config) for number in numbers] == 2 * layers
