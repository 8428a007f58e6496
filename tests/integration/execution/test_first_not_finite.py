"""A run that diverges names the phase, layer, micro-batch and tensor where a number first stopped
being finite.
"""

import numpy as np
import popxl
import pytest
from popxl import ops

from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.demo.pretraining import main
from popxl_gpt.execution import phases
from popxl_gpt.execution.host import run_steps
from popxl_gpt.execution.overflow import Skipped, name_the_first
from popxl_gpt.execution.variables import write_whole_weights
from popxl_gpt.utils.errors import DivergedError
from tests.integration.gpt_oracle import random_batch, random_weights
from tests.integration.runs import TRAINED
from tests.integration.skipping import flags, session_of, state_of

HALF = override(
    TRAINED,
    precision="float16",
    stochastic_rounding=False,
    dropout=0.0,
    global_batch_size=8,
    micro_batch_size=1,
)
KINDS = {"layer_pattern": ("sliding", "sliding", "full"), "window": 2}
GRID = {"data_parallel": 2, "tensor_parallel_1": 2, "tensor_parallel_2": 2}
TOKEN, POSITION, SAMPLE = 17, 3, 5
LAYOUTS = [
    ({}, "micro-batch 5"),
    ({"widening": 2}, "micro-batches 4 to 5"),
    ({"device_iterations": 2}, "micro-batch 5"),
    ({"data_parallel": 2, "recomputation": False}, "micro-batch 2"),  # of its replica
    ({**GRID, "micro_batch_size": 2}, "micro-batch 1"),
    ({"micro_batch_size": 8}, "micro-batch 0"),
    ({"micro_batch_group": 2, "tied_head": False}, "micro-batch 5"),
]


def first_place(session, config: Config, words: np.ndarray, labels: np.ndarray) -> str:
    """What is named after a call whose steps are skipped. Nothing changes meanwhile."""
    count = config.execution.device_iterations
    words, labels = (np.concatenate([a] * count) for a in (words, labels))
    with session:
        results = run_steps(session, config, words, labels, [1e-3] * count)
        assert all(result.is_skipped for result in results)
        before = (
            state_of(session),
            Skipped.of(session),
            session.get_tensor_data(session.state.seed).tobytes(),
        )
        place = name_the_first(session, config, words, labels, results)
        assert (
            state_of(session),
            Skipped.of(session),
            session.get_tensor_data(session.state.seed).tobytes(),
        ) == before
    assert place is not None
    return place


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("changes, micro_batch", LAYOUTS)
def test_the_micro_batch_of_an_overflow_is_named(changes, micro_batch):
    config = override(HALF, **changes)
    session = session_of(config)
    weights = random_weights(config.model)
    weights["embedding.word.weight"][TOKEN] = 65000.0
    weights["embedding.position.weight"][POSITION] = 600.0
    write_whole_weights(session, config, weights.items())
    words, labels = random_batch(config)
    words[words == TOKEN] = 0
    words[SAMPLE, POSITION] = TOKEN
    place = first_place(session, config, words, labels)
    assert place.startswith(f"phase embedding_fwd_phase, {micro_batch}: tensor "), place
    assert "(inf), by add of replica" in place and "embedding.py" in place


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"layers": 1}, {"device_iterations": 2}, {**KINDS, "layers": 4}]
)
def test_the_layer_of_an_overflow_in_the_backward_pass_is_named(changes, monkeypatch):
    config = override(HALF, **changes)
    layer, run_gradient = config.model.layers - 1, phases._run_gradient

    def with_overflow(graphs, row, *rest):
        gradients = run_gradient(graphs, row, *rest)
        if "attention.qkv.bias" in graphs.table:
            t = gradients["attention.qkv.bias"]
            here = ops.equal(row, popxl.constant(layer, popxl.int32))
            huge = ops.where(here, popxl.constant(np.full(t.shape, 3e38, np.float32)), t)
            ops.add_(t, ops.mul(huge, popxl.constant(np.float32(1e3))))
        return gradients

    monkeypatch.setattr(phases, "_run_gradient", with_overflow)
    place = first_place(session_of(config), config, *random_batch(config))
    assert place.startswith(f"phase decoder_bwd_phase, layer {layer}: tensor "), place
    assert "(inf), by mul of replica 0" in place


@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, 2])
def test_the_layer_of_an_overflow_in_a_later_group_is_named(layer, monkeypatch):
    config = override(HALF, micro_batch_group=2)
    run_gradient = phases._run_gradient

    def with_overflow(graphs, row, group, *rest):
        gradients = run_gradient(graphs, row, group, *rest)
        if group is not None and "attention.qkv.bias" in graphs.table:
            t = gradients["attention.qkv.bias"]
            there = ops.equal(row, popxl.constant(layer, popxl.int32))
            third = ops.equal(group, popxl.constant(2, popxl.int32))
            huge = popxl.constant(np.full(t.shape, 3e38, np.float32))
            huge = ops.where(ops.logical_and(there, third), huge, t)
            ops.add_(t, ops.mul(huge, popxl.constant(np.float32(1e3))))
        return gradients

    monkeypatch.setattr(phases, "_run_gradient", with_overflow)
    place = first_place(session_of(config), config, *random_batch(config))
    assert place.startswith(f"phase decoder_bwd_phase, layer {layer}: tensor "), place
    assert "(inf), by mul of replica 0" in place


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("changes", [{}, {"tensor_parallel_1": 2}, {"device_iterations": 2}, KINDS])
def test_the_layer_of_a_weight_that_is_not_finite_is_named(layer, changes):
    config = override(HALF, **changes)
    session = session_of(config)
    variable = session.state.to_dict()[f"weights.decoder.{layer}.feed_forward.up.weight"]
    data = np.array(session.get_tensor_data(variable))
    data.reshape(-1)[7] = np.nan
    session.write_variables_data({variable: data})
    place = first_place(session, config, *random_batch(config))
    assert place.startswith(f"phase decoder_fwd_phase, layer {layer}: tensor "), place
    assert "(nan), by remote_load" in place


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "layer, changes",
    [(1, {}), (2, {}), (4, {"recomputation": False, "device_iterations": 2})],
)
def test_the_layer_is_named_among_those_of_several_kinds(layer, changes):
    config = override(HALF, **KINDS, layers=5, **changes)
    session, weights = session_of(config), random_weights(config.model)
    weights[f"decoder.{layer}.feed_forward.down.bias"][:] = 65504.0  # what is beyond it is added
    weights[f"decoder.{layer}.attention.output.bias"][:] = 65504.0
    write_whole_weights(session, config, weights.items())
    place = first_place(session, config, *random_batch(config))
    assert place.startswith(f"phase decoder_fwd_phase, layer {layer}, micro-batch 0: "), place


@pytest.mark.slow
def test_the_end_of_a_run_names_the_place(tmp_path):
    words = (
        "--precision",
        "float16",
        "--loss_scaling",
        3e5,
        "--max_skipped",
        4,
        "--device_iterations",
        2,
    )
    with pytest.raises(
        DivergedError,
        match="The first number that was not finite: phase head_phase, micro-batch 0: ",
    ):
        main(flags(tmp_path, *words))
