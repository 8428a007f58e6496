"""Where rows are in files, or not all on the device, the decoder's updates of a run's last step wait
for the next run: the same bits as without, fewer bytes moved, and nobody reads what an update is
still due to.
"""

import dataclasses
from pathlib import Path

import numpy as np
import popxl
import pytest
from helpers.quick import cases
from popxl.extensions import device_needs, plan

from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.execution import pretraining
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.manifest import read_manifest
from popxl_gpt.execution.checkpoints.saved_state import Position
from popxl_gpt.execution.checkpoints.saving import save
from popxl_gpt.execution.host import StepResult, run_steps
from popxl_gpt.execution.overflow import Skipped
from popxl_gpt.utils.runtime import file_traffic
from tests.integration.gpt_oracle import small
from tests.integration.runs import TRAINED, batches
from tests.integration.skipping import GRID, POISON, session_of, state_of

STEPS = 8
MEMORY = 220_000
"""Bytes of a replica that hold what the largest phase uses at a time, and not much more."""
RATES = [1e-3, POISON, 1e-3, POISON, 1e-3, 1e-3, 1e-3, POISON]
"""Steps with and without an update, before and after calls of one step, two and four."""
LAYOUTS = {
    "one": {},
    "two iterations, muon": {"device_iterations": 2, "optimizer": "muon"},
    "four iterations": {"device_iterations": 4},
    "all": {**GRID, "heads": 4, "vocabulary_size": 40},
    "all, four iterations, not clipped": {
        **GRID, "heads": 4, "vocabulary_size": 40, "device_iterations": 4, "max_norm": 0.0,
    },
    "dp, whole, rounded to nearest": {
        "data_parallel": 2, "micro_batch_size": 1, "replicated_tensor_sharding": False,
        "stochastic_rounding": False,
    },
    "float16, scaled by the program": {"precision": "float16", "loss_scaling": "auto"},
    "moments in 8 bits, gradients in 16, some layers keep": {
        "moment_precision": "8bit", "activation_memory": 30_000, "micro_batch_size": 4,
        "gradient_precision": "bfloat16",
    },
    "spikes": {"on_spike": "skip", "spike_threshold": 0.1, "spike_window": 2},
}  # fmt: skip
some_layouts = pytest.mark.parametrize(
    "name", cases(LAYOUTS, lambda name: name in ("one", "all", "four iterations"))
)


def in_files(config: Config, folder: Path) -> Config:
    memory = MEMORY * config.execution.replication_factor
    return override(config, memmap_dir=str(folder), host_memory=memory)


def on_a_small_device(config: Config) -> Config:
    """With room for the rows in use and few others."""
    streamed = override(config, device_memory=2**30)
    ir, _, _ = pretraining.training_program(streamed)
    return override(
        streamed,
        device_memory=device_needs(ir, device="cpu").least * config.execution.replication_factor,
    )


def take(session, config: Config, first: int, steps: int) -> "list[StepResult]":
    """Run some steps in an open block of a session."""
    iterations, data, results = config.execution.device_iterations, batches(config), []
    for at in range(first, first + steps, iterations):
        words, labels = (np.concatenate(part) for part in zip(*data[at : at + iterations]))
        results += run_steps(session, config, words, labels, RATES[at : at + iterations])
    return results


def half_saved(config: Config, folder: Path):
    """All steps, with a checkpoint and a look at the state between: results, checkpoint, states."""
    session = session_of(config)
    with session:
        results = take(session, config, 0, STEPS // 2)
        saved = save(session, config, folder, Position(STEPS // 2, "data"))
        states = [state_of(session)]
        results += take(session, config, STEPS // 2, STEPS // 2)
    return results, saved, [*states, state_of(session)], Skipped.of(session)


def contents(checkpoint: Path) -> "dict[str, object]":
    """All that a checkpoint says and holds, but for its configuration."""
    found = {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}
    manifest = read_manifest(checkpoint / "checkpoint.json")
    return {**found, **{k: v for k, v in manifest.items() if k not in ("config", "sha256")}}


@pytest.mark.sampled(3)
@pytest.mark.slow
@some_layouts
def test_results_checkpoints_and_states_are_those_of_updates_that_wait_for_no_run(
    name, tmp_path, poisoned
):
    config = override(TRAINED, steps=STEPS, **LAYOUTS[name])
    waiting = in_files(config, tmp_path / "rows")
    assert pretraining.updates_wait(waiting.execution)
    assert not pretraining.updates_wait(config.execution)
    expected, theirs, their_states, their_skipped = half_saved(config, tmp_path / "plain")
    results, ours, our_states, our_skipped = half_saved(waiting, tmp_path / "waiting")
    assert str(results) == str(expected)  # among the norms may be NaN
    assert our_states == their_states and our_skipped == their_skipped
    assert contents(ours) == contents(theirs)
    assert our_states[0] != our_states[1] and our_skipped.total >= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one", "all"])
def test_a_device_without_all_rows_has_what_one_with_them_has(name, tmp_path, poisoned):
    config = override(TRAINED, steps=STEPS, **LAYOUTS[name])
    waiting = on_a_small_device(config)
    assert pretraining.updates_wait(waiting.execution)
    expected, theirs, their_states, their_skipped = half_saved(config, tmp_path / "plain")
    results, ours, our_states, our_skipped = half_saved(waiting, tmp_path / "waiting")
    assert str(results) == str(expected)
    assert our_states == their_states and our_skipped == their_skipped
    assert contents(ours) == contents(theirs)


@pytest.mark.slow
def test_rows_come_to_a_device_once_for_an_update_and_the_next_forward_pass(monkeypatch):
    config, moved = override(TRAINED, steps=STEPS, layers=8), []
    for waits in (False, True):
        monkeypatch.setattr(pretraining, "updates_wait", lambda execution, waits=waits: waits)
        session = session_of(on_a_small_device(config))
        with session:
            take(session, config, 0, 2)
            before = file_traffic(session).read_bytes
            take(session, config, 2, STEPS - 2)
            moved.append(file_traffic(session).read_bytes - before)
    assert moved[1] < 0.98 * moved[0], moved


@pytest.mark.slow
def test_a_checkpoint_that_is_restored_knows_no_update_of_the_steps_after_it(tmp_path):
    config = in_files(override(TRAINED, steps=STEPS), tmp_path / "rows")
    session = session_of(config)
    with session:
        take(session, config, 0, 1)
        saved = save(session, config, tmp_path, Position(1, "data"))
        expected = take(session, config, 2, 1)
        SavedRun(saved, config).restore(session)
        assert take(session, config, 2, 1) == expected


@pytest.mark.slow
def test_rows_of_updates_that_wait_are_read_once_with_the_forward_pass(tmp_path, monkeypatch):
    config = override(
        TRAINED, steps=STEPS, layers=8, precision="float32", moment_precision="bfloat16"
    )
    moved = []
    for waits in (False, True):
        monkeypatch.setattr(pretraining, "updates_wait", lambda execution, waits=waits: waits)
        session = session_of(override(config, memmap_dir=str(tmp_path), host_memory=500_000))
        with session:
            take(session, config, 0, 2)
            before = dataclasses.replace(file_traffic(session))
            take(session, config, 2, STEPS - 2)
            after = file_traffic(session)
        moved.append(
            [getattr(after, n) - getattr(before, n) for n in ("read_bytes", "written_bytes")]
        )
    (read, written), (read_waiting, written_waiting) = moved
    assert read_waiting < 0.9 * read and written_waiting < 1.01 * written, moved


def planned(**changes):
    ir, _, _ = pretraining.training_program(
        small(layers=3, steps=6, memmap_dir="rows", host_memory=2**30, **changes)
    )
    return ir, plan(ir)


@pytest.mark.parametrize("iterations", [1, 3])
def test_a_step_is_planned_with_the_update_of_the_one_before(iterations, monkeypatch):
    ir, found = planned(device_iterations=iterations)
    assert found.steps == iterations
    runs = {phase.name: phase.runs for phase in found.phases if phase.name.startswith("decoder")}
    assert runs == {
        "decoder_optim_fwd_phase": 3 * iterations,
        "decoder_bwd_phase": 3 * iterations,
    }
    by_download = [
        op.called()[0][0].name.split("_subgraph(")[0]
        for op in ir.main_graph.ops
        if op.execution is popxl.ExecutionContext.WeightsToHostFragment and op.called()
    ]
    assert by_download == ["decoder_optim_phase"]
    monkeypatch.setattr(pretraining, "updates_wait", lambda execution: False)
    _, plain = planned()
    for amount in ("flops", "loaded_bytes", "stored_bytes", "host_bytes"):
        total, alone = (
            sum(getattr(phase, amount) for phase in each.phases) for each in (found, plain)
        )
        assert total == iterations * alone
