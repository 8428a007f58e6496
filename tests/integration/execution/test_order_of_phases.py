"""The order in which a program runs its phases, and what its updates share."""

import dataclasses

import popxl
import pytest
from popxl import Tensor

from popxl_gpt.config.presets import override
from popxl_gpt.execution.inference.inference import evaluation
from popxl_gpt.execution.pretraining import training_program
from popxl_gpt.execution.train_state import TrainState
from tests.integration.gpt_oracle import small

LAYERS = 3
STEP = [
    ("embedding_fwd_phase", 1),
    ("decoder_fwd_phase", LAYERS),
    ("head_phase", 1),
    ("decoder_bwd_phase", LAYERS),
    ("embedding_bwd_phase", 1),
    ("head_optim_phase", 1),
    ("decoder_optim_phase", LAYERS),
]


def calls(graph: popxl.Graph) -> "list[tuple[popxl.Graph, int]]":
    """The graphs that a graph calls, in order, and how often each."""
    return [
        (called, op.arguments.get("repeat_count", 1))
        for op in graph.ops
        for called, _ in op.called()
    ]


def named(found: "list[tuple[popxl.Graph, int]]") -> "list[tuple[str, int]]":
    return [(graph.name.split("_subgraph(")[0], times) for graph, times in found]


def program(**changes) -> popxl.Ir:
    ir, _, _ = training_program(small(layers=LAYERS, steps=6, **changes))
    return ir


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dropout": 0.1, "precision": "float16", "loss_scaling": "auto"},
        {"data_parallel": 2},
    ],
)
def test_a_step_is_seven_phases_in_order(changes):
    assert named(calls(program(**changes).main_graph)) == STEP


@pytest.mark.parametrize(
    ("changes", "runs"),
    [
        ({"global_batch_size": 8}, 8),
        ({"global_batch_size": 8, "micro_batch_group": 2}, 2),
        ({"global_batch_size": 8, "data_parallel": 2, "interleaving": 2}, 4),
        ({"layer_pattern": ("sliding", "full"), "window": 5, "activation_memory": 30_000}, 4),
    ],
    ids=str,
)
def test_activations_wait_for_every_layer_and_their_gradients_for_one(changes, runs):
    _, io, _ = training_program(small(layers=LAYERS, micro_batch_size=1, **changes))
    entries = {name: buffer.entries for name, buffer in io.buffers.items()}
    assert entries == {"x": (LAYERS + 1) * runs, "dx": runs}


@pytest.mark.slow
def test_later_steps_update_each_layer_of_the_decoder_before_it_runs_forward():
    *first, (later, times), last = calls(program(device_iterations=3).main_graph)
    assert named(first) == STEP[:-1]
    assert times == 2
    lazy = [
        ("decoder_optim_fwd_phase", n) if i == 1 else (name, n) for i, (name, n) in enumerate(STEP)
    ]
    assert named(calls(later)) == lazy[:-1]
    assert named([last]) == STEP[-1:]


def test_later_steps_run_the_same_graphs_but_for_the_decoders_forward_pass():
    *first, (later, _), _ = calls(program(device_iterations=3).main_graph)
    same = [a is b for (a, _), (b, _) in zip(first, calls(later), strict=True)]
    assert same == [True, False, True, True, True, True]


def test_a_forward_program_runs_every_layer_once():
    session = evaluation(small(layers=LAYERS))
    assert named(calls(session.ir.main_graph)) == [
        ("embedding_fwd_phase", 1),
        ("decoder_fwd_phase", LAYERS),
        ("head_fwd_phase", 1),
    ]


ROUNDED = {"precision": "bfloat16", "stochastic_rounding": True}
SCALED = {"precision": "float16", "loss_scaling": "auto"}


@pytest.mark.parametrize(
    "changes, count",
    [({}, 3), (ROUNDED, 4), (SCALED, 4), (SCALED | ROUNDED | {"precision": "float16"}, 5)],
)
def test_a_state_of_updates_is_the_same_after_it_was_handed_on_as_tensors(changes, count):
    training = override(small(stochastic_rounding=False), **changes).training
    ir = popxl.Ir()
    with ir.main_graph:
        seed = popxl.constant([1, 2], popxl.uint32)
        scalars = [popxl.constant(float(i), popxl.float32) for i in range(3)]
        finite = popxl.constant(True, popxl.bool)
    state = TrainState(
        learning_rate=scalars[0],
        grad_norm=scalars[1],
        is_applied=finite,
        loss_scale=scalars[2] if training.is_scaled_by_program else training.fixed_scale,
        rounding=seed if training.stochastic_rounding else "nearest",
    )
    tensors = state.tensors()
    assert len(tensors) == count and all(isinstance(t, Tensor) for t in tensors)
    again = TrainState.unpack(training, tensors)
    for field in dataclasses.fields(TrainState):
        assert getattr(again, field.name) is getattr(state, field.name)
