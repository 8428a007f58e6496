"""Remote memory of each replica falls as one over the replicas that share the state: read from what
is in use.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from popxl_addons import TaskSession
from popxl_engine.machine.replica import Replica

from popxl_gpt.config.presets import override, preset
from popxl_gpt.execution.host import run_steps
from popxl_gpt.execution.planning.memory import state_bytes
from popxl_gpt.execution.planning.model_size import parameter_count
from popxl_gpt.execution.variables import gradient_variables
from tests import warm
from tests.integration.execution import memory_program
from tests.integration.execution.memory_program import stepped
from tests.integration.execution.plan_cases import step_arrays
from tests.integration.runs import run_job

ROOT = Path(__file__).parents[3]
TOLERANCE = 0.03
BYTES_PER_PARAMETER = 16
"""Weight, gradient and two moments, float32, each of which exists once."""


def held_bytes(session: TaskSession) -> "list[int]":
    """For each replica, the memory behind its remote buffers."""
    return [
        sum(rows.held_bytes for rows in replica.rows.values())
        for replica in session._engine.machine.replicas
    ]


GRIDS = [
    (2, 1, 1),
    (3, 1, 1),
    (5, 1, 1),
    (1, 2, 1),
    (1, 1, 2),
    (4, 1, 1),
    (1, 2, 2),
    (2, 1, 2),
    (8, 1, 1),
    (1, 8, 1),
    (1, 1, 8),
    (2, 2, 2),
]


def sharded_bytes(dp: int, tp1: int, tp2: int, **changes: object) -> "list[int]":
    sizes = {"hidden_size": 128, "heads": 8, "vocabulary_size": 512}
    layout = {"data_parallel": dp, "tensor_parallel_1": tp1, "tensor_parallel_2": tp2}
    return held_bytes(stepped(preset("tiny", **sizes, **layout, **changes)))


@functools.cache
def alone(batch: int) -> int:
    """Bytes that a single replica holds."""
    (found,) = sharded_bytes(1, 1, 1, global_batch_size=batch)
    return found


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_replica_holds_its_share_of_the_live_buffers(grid):
    batch = 8 if 8 % grid[0] == 0 else 15
    found = sharded_bytes(*grid, global_batch_size=batch)
    share = alone(batch) / np.prod(grid)
    assert len(found) == np.prod(grid)
    for held in found:
        assert held == pytest.approx(share, rel=TOLERANCE)


@pytest.mark.slow
def test_moments_take_a_half_in_bfloat16_and_a_quarter_in_8_bits_of_what_float32_takes():
    config = preset(
        "tiny", hidden_size=128, data_parallel=1, tensor_parallel_1=1, tensor_parallel_2=1
    )
    narrow = override(config, moment_precision="bfloat16", stochastic_rounding=True)
    (wide_bytes,), (narrow_bytes,) = held_bytes(stepped(config)), held_bytes(stepped(narrow))
    assert wide_bytes - narrow_bytes == 2 * 2 * parameter_count(config.model)
    assert state_bytes(config) - state_bytes(narrow) == wide_bytes - narrow_bytes
    coded = override(narrow, moment_precision="8bit")
    (coded_bytes,) = held_bytes(stepped(coded))
    weights = parameter_count(config.model)
    # and a byte for each 32 numbers
    assert wide_bytes - coded_bytes == pytest.approx(2 * (4 - 1 - 1 / 32) * weights, rel=1e-3)
    assert state_bytes(config) - state_bytes(coded) == 2 * 3 * weights


@pytest.mark.slow
def test_gradients_of_one_step_and_activations_of_the_next_are_never_there_together(monkeypatch):
    config = preset(
        "tiny",
        data_parallel=1,
        tensor_parallel_1=1,
        tensor_parallel_2=1,
        layers=8,
        recomputation=False,
    )
    session = stepped(config)
    (replica,) = session._engine.machine.replicas
    rows_of_gradients = {v.location_info.buffer for v in gradient_variables(session.ir).values()}
    state = {
        v.location_info.buffer for v in session.state.to_dict().values() if v.location_info
    } - rows_of_gradients
    whole, gradients, kept = (
        sum(replica.rows[b].nbytes for b in buffers)
        for buffers in (replica.rows, rows_of_gradients, state)
    )
    activations = whole - gradients - kept
    held, store = [], Replica.remote_store

    def counting(*arguments):
        store(*arguments)
        held.extend(held_bytes(session))

    monkeypatch.setattr(Replica, "remote_store", counting)
    with session:
        run_steps(session, config, *step_arrays(config))
    assert min(gradients, activations) > 0.15 * whole
    # the head stores its own while the activations of its step are there
    beside = sum(replica.rows[b].nbytes for b in rows_of_gradients if b.entries == 1)
    assert 10 * beside < gradients
    assert max(held) <= kept + max(gradients, activations + beside)


@pytest.mark.slow
def test_without_sharding_every_replica_holds_all_that_it_shares():
    whole = sharded_bytes(4, 1, 1, replicated_tensor_sharding=False, global_batch_size=8)
    assert min(whole) > 0.9 * alone(8)


def grown_bytes(folder: Path, processes: int) -> "list[int]":
    """For each process of a run with one replica in each, what its layers' state adds to its
    resident set.
    """
    folder.mkdir()
    program = [sys.executable, memory_program.__file__, str(folder)]
    launcher = [warm.launcher(), "-m", "poprun", "--num-replicas", str(processes)]
    plain = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("RANK", "WORLD_SIZE", "POPDIST_"))
    }
    # Threads draw weights: with arenas of their own glibc would keep some of what they freed. And
    # the allocator of tensors has huge pages, of which one is two parts in a hundred here.
    environment = {
        **plain,
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
        "POPXL_NATIVE": "0",
        "PYTHONPATH": str(ROOT),
    }
    command = [*launcher, "--num-instances", str(processes), *program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = [json.loads(path.read_text()) for path in sorted(folder.iterdir())]
    assert len(found) == processes
    return found


@pytest.mark.slow
@pytest.mark.multi
def test_resident_sets_of_processes_grow_by_their_share(tmp_path):
    grown = {processes: grown_bytes(tmp_path / str(processes), processes) for processes in (1, 2)}
    (alone,) = grown[1]
    shallow, _, deep = (
        parameter_count(memory_program.configuration(layers, 1).model)
        for layers in memory_program.LAYERS
    )
    assert alone == pytest.approx(BYTES_PER_PARAMETER * (deep - shallow), rel=TOLERANCE)
    for processes, found in grown.items():
        for held in found:
            assert held == pytest.approx(alone / processes, rel=TOLERANCE), grown


KEEPS_AND_RELEASES = """
import popxl_engine.backend  # takes memory, too
from popxl_engine.machine.allocator import keep_freed_memory
from popxl_gpt.utils.process_memory import resident_bytes
from popxl_gpt.utils.runtime import release_freed_memory
keep_freed_memory()
blocks = [bytearray(2**20) for _ in range(64)]
del blocks
kept = resident_bytes()
release_freed_memory()
print(kept - resident_bytes())
"""


@pytest.mark.multi
def test_freed_memory_that_the_engine_keeps_is_handed_back_when_asked():
    done = subprocess.run(
        [sys.executable, "-c", KEEPS_AND_RELEASES], check=True, capture_output=True, text=True
    )
    assert int(done.stdout) > 60 * 2**20


@pytest.mark.slow
def test_memory_is_handed_back_after_compiling_around_validations_and_before_the_last_save(
    tmp_path, monkeypatch
):
    released: list[bool] = []
    for part in ("resident_memory", "validations", "checkpoints"):
        monkeypatch.setattr(
            f"popxl_gpt.demo.job.{part}.release_freed_memory", lambda: released.append(True)
        )
    run_job(
        *("--config", "tiny", "--name", "run", "--run_folder", tmp_path, "--samples", 0),
        *("--steps", 4, "--warmup_steps", 0, "--validate_every", 2),
    )
    assert len(released) == 1 + 2 * 2 + 1  # and before the last checkpoint
