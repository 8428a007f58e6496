"""The training program for GPUs, whose attention keeps no probabilities: its numbers, its steps and
its memory.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
from helpers.fake_gpu import CUDA
from helpers.quick import cases
from popxl.extensions import device_needs
from popxl_engine import compiler, passes
from popxl_engine.engine import Engine

from popxl_gpt.config.presets import override
from popxl_gpt.execution.pretraining import training_program
from tests.integration.execution.plan_cases import planned
from tests.integration.gpt_oracle import distance, small
from tests.integration.runs import gradients_of, worst_distance

SEQUENCE = 40
CONFIG = small(
    hidden_size=48,
    sequence_length=SEQUENCE,
    max_positions=160,
    precision="float32",
    global_batch_size=4,
    micro_batch_size=2,
)


@pytest.fixture
def on_a_processor(monkeypatch):
    """Lets processors have the passes for GPUs, too; what is chosen is the number of attention's
    steps in the last session's program.
    """
    chosen = {}
    for_devices = passes.PASSES

    def choose(is_streamed):
        device = CUDA if is_streamed else passes.CPU
        chosen_passes = [
            replace(p, devices=lambda _: True) for p in for_devices if p.devices(device)
        ]
        monkeypatch.setattr(passes, "PASSES", chosen_passes)
        chosen.clear()
        return chosen

    original = Engine.__init__

    def prepare(engine, *arguments, **options):
        original(engine, *arguments, **options)
        names = re.findall(r"k_fused_(\w*attention\w*?)_\d+\w*\(", engine.program.source.text())
        chosen.update({name: names.count(name) for name in names})

    monkeypatch.setattr(Engine, "__init__", prepare)
    return choose


def with_and_without(config, on_a_processor):
    """Loss, gradients and their norm of a step that keeps probabilities, and of one that does
    not.
    """
    chosen = on_a_processor(False)
    kept = gradients_of(config)
    assert chosen == {"attention": 1, "attention_no_probs": 1, "attention_grad_packed": 1}
    on_a_processor(True)
    streamed = gradients_of(config)
    assert chosen == {"flash_attention": 2, "flash_attention_grad": 1}
    return kept, streamed


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", cases([{}, {"widening": 2}, {"tensor_parallel_1": 3}], lambda changes: not changes)
)
def test_loss_and_gradients_are_those_of_a_step_that_keeps_probabilities(changes, on_a_processor):
    (loss, gradients, norm), (other_loss, others, other_norm) = with_and_without(
        override(CONFIG, **changes), on_a_processor
    )
    np.testing.assert_allclose([other_loss, other_norm], [loss, norm], rtol=2e-6)
    worst, name = worst_distance(others, gradients)
    assert worst < 2e-6, name


@pytest.mark.slow
def test_in_bfloat16_gradients_are_as_near_to_those_in_float32(on_a_processor):
    (_, exact, _), _ = with_and_without(CONFIG, on_a_processor)
    (_, kept, _), (_, streamed, _) = with_and_without(
        override(CONFIG, precision="bfloat16"), on_a_processor
    )
    for name, array in exact.items():
        assert distance(streamed[name], array) < 1.2 * distance(kept[name], array) + 1e-3, name


def blocks_of(block):
    yield block
    for instr in block.instrs:
        for body in instr.bodies:
            yield from blocks_of(body)


def steps_of(config, device=CUDA):
    """(names of steps of attention, how many values and constants have a number for each query and
    key).
    """
    main = compiler.compile(training_program(config)[0], device).block
    names, squares = [], 0
    for block in blocks_of(main):
        names += [
            i.definition.name
            for i in block.instrs
            if i.definition and "attention" in i.definition.name
        ]
        shapes = [v.spec.shape for i in block.instrs for v in i.outputs] + [
            c.shape for c in block.constants
        ]
        squares += sum(shape[-2:] == (SEQUENCE, SEQUENCE) for shape in shapes)
    return names, squares


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    cases(
        [{"precision": "float32"}, {}, {"recomputation": False}],
        lambda changes: changes.get("precision") is None,
    ),
)
def test_on_a_gpu_nothing_has_a_number_for_each_query_and_key(changes):
    names, squares = steps_of(override(CONFIG, **{"precision": "bfloat16", **changes}))
    assert names == [
        "fused_flash_attention",
        "fused_flash_attention",
        "fused_flash_attention_grad",
    ]
    assert not squares


@pytest.mark.slow
def test_with_dropout_they_are_kept():
    names, squares = steps_of(override(CONFIG, dropout=0.1))
    kept = {"fused_attention", "fused_attention_no_probs", "fused_attention_grad_packed"}
    assert set(names) == kept and squares


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_without_recomputation_a_processor_has_nothing_like_it(dropout):
    names, squares = steps_of(
        override(CONFIG, recomputation=False, dropout=dropout), device=passes.CPU
    )
    assert names == ["fused_attention_no_probs", "fused_attention_grad_packed"]
    assert not squares


@pytest.mark.slow
def test_a_gpu_needs_less_memory_beside_its_rows():
    ir = training_program(override(CONFIG, sequence_length=160))[0]
    here, there = (device_needs(ir, name) for name in ("cpu", "cuda"))
    probabilities = 4 * CONFIG.execution.micro_batch_size * CONFIG.model.heads * 160**2
    saved = (
        probabilities - probabilities // 160
    )  # a query's logarithm of a sum is kept in their place
    assert here.least - there.least >= saved and here.resident - there.resident >= saved


@pytest.mark.slow
def test_the_plan_of_a_run_is_for_its_device():
    plans = [
        planned(override(CONFIG, sequence_length=160, device=name)).program
        for name in ("auto", "cuda:1")
    ]
    here, there = ({phase.name: phase.peak_bytes for phase in plan.phases} for plan in plans)
    probabilities = 4 * CONFIG.execution.micro_batch_size * CONFIG.model.heads * 160**2
    logsumexp = probabilities // 160
    assert here["decoder_bwd_phase"] - there["decoder_bwd_phase"] >= probabilities - logsumexp
