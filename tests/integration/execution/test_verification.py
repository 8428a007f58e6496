"""Phases that run twice: the numbers stay, and what the first time left wrong is found."""

import re

import numpy as np
import pytest
import torch
from popxl_engine.machine.replica import Replica

from popxl_gpt.config.presets import override
from popxl_gpt.config.schedules import learning_rate
from popxl_gpt.demo.pretraining import main
from popxl_gpt.execution.checkpoints.checkpoint_folder import checkpoints_in
from popxl_gpt.execution.host import run_steps
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.variables import read_weights, write_whole_weights
from popxl_gpt.execution.verification import due, verified
from popxl_gpt.utils.errors import CorruptedError
from tests.integration.gpt_oracle import random_weights
from tests.integration.runs import TRAINED, batches

ALL = range(1000)
"""Phases of a run, each more than once."""
GRID = {"data_parallel": 2, "tensor_parallel_2": 2}


def train(config, numbers) -> "tuple[list, dict[str, np.ndarray]]":
    """Results of a run's first steps, of which some phases run twice, and the weights after."""
    session, iterations = pretraining(config), config.execution.device_iterations
    write_whole_weights(session, config, random_weights(config.model).items())
    results = []
    with session:
        for first in range(0, 2, iterations):
            data = batches(config)[first : first + iterations]
            words, labels = (np.concatenate(part) for part in zip(*data))
            rates = [learning_rate(config.training, first + i) for i in range(iterations)]
            with verified(session, config, first, numbers):
                results += run_steps(session, config, words, labels, rates)
    return results, read_weights(session, config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"device_iterations": 2, "recomputation": False},
        GRID,
        {"host_memory": 200_000},
        {"moment_precision": "8bit", "stochastic_rounding": True, **GRID},
    ],
    ids=["one", "two steps a run", "4 replicas", "files", "moments in 8 bits"],
)
def test_phases_that_run_twice_come_to_the_same_and_change_no_number(changes, tmp_path):
    if "host_memory" in changes:
        changes = {**changes, "memmap_dir": str(tmp_path)}
    config = override(TRAINED, **changes)
    (once, weights), (twice, weights_after) = train(config, []), train(config, ALL)
    assert once == twice
    assert all(weights[name].tobytes() == weights_after[name].tobytes() for name in weights)


@pytest.fixture
def flips(monkeypatch):
    """Flips the lowest bit of the first byte that the phases of a call store, or tell the host, as
    number `flips["at"]`.
    """
    flips = {"at": -1, "seen": 0, "name": ""}

    def flipping(name):
        plain = getattr(Replica, name)

        def changed(self, *words):
            if flips["of"] is self:
                t = words[-1][0] if name == "remote_store" else words[-1]
                if flips["seen"] == flips["at"]:
                    t.reshape(-1).view(torch.uint8)[0] ^= 1
                    flips["name"] = name
                flips["seen"] += 1
            plain(self, *words)

        monkeypatch.setattr(Replica, name, changed)

    flipping("remote_store")
    flipping("host_store")
    return flips


def named(message: str) -> "tuple[str, str, str]":
    """Tensor, phase and layer of a message; no layer where there is none."""
    found = re.match(
        r"step 7: got other bytes of tensor (.+?) from phase (\w+)(?:, layer (\d+))?, on replica 0,",
        message,
    )
    assert found, message
    return found[1], found[2], found[3] or ""


@pytest.mark.slow
def test_a_flipped_bit_in_anything_that_a_phase_leaves_is_found_and_named(flips):
    config = override(TRAINED, layers=2, global_batch_size=2, hidden_size=24, heads=3)
    session, found = pretraining(config), []
    words, labels = batches(config)[0]
    with session:
        (flips["of"],) = session._engine.machine.replicas
        number = 0
        while True:
            flips.update(at=number, seen=0, name="")
            try:
                with verified(session, config, 7, ALL):
                    run_steps(session, config, words, labels, [1e-3])
            except CorruptedError as error:
                found.append(named(str(error)))
            else:
                outside = flips["name"] == "host_store"  # the norm, from between the phases
                if flips["seen"] <= number:
                    break
                assert outside, f"store {number} of {flips['seen']}"
            number += 1
    kinds = {phase for _, phase, _ in found}
    assert kinds == {
        "embedding_fwd_phase",
        "decoder_fwd_phase",
        "head_phase",
        "decoder_bwd_phase",
        "embedding_bwd_phase",
        "head_optim_phase",
        "decoder_optim_phase",
    }
    assert {layer for _, phase, layer in found if "decoder" in phase} == {"0", "1"}
    assert len(found) == number - 1
    tensors = {tensor for tensor, phase, _ in found if phase == "decoder_optim_phase"}
    weights = {name for name in session.state.to_dict() if name.startswith("weights.decoder.")}
    assert weights and weights <= tensors


OTHERS = {
    "muon": {"optimizer": "muon"},
    "moments in 8 bits": {"moment_precision": "8bit"},
    "adapters": {"lora_rank": 2},
    "loss scale of the program": {
        "precision": "float16", "stochastic_rounding": False, "loss_scaling": "auto"
    },
}  # fmt: skip
EVERY = 9
"""Which of the rows that the phases of a step store are damaged: more than 100 in all."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_a_flipped_bit_is_found_whatever_updates_weights_and_however_moments_are_kept(flips, name):
    config = override(
        TRAINED, layers=2, global_batch_size=2, hidden_size=24, heads=3, **OTHERS[name]
    )
    session, phases = pretraining(config), set()
    words, labels = batches(config)[0]
    with session:
        (flips["of"],) = session._engine.machine.replicas
        flips.update(at=-1, seen=0)
        run_steps(session, config, words, labels, [1e-3])
        for number in range(0, flips["seen"], EVERY):
            flips.update(at=number, seen=0, name="")
            try:
                with verified(session, config, 7, ALL):
                    run_steps(session, config, words, labels, [1e-3])
            except CorruptedError as error:
                phases.add(named(str(error))[1])
            else:
                assert flips["name"] == "host_store", f"store {number} of {flips['seen']}"
    assert {"decoder_bwd_phase", "decoder_optim_phase"} <= phases


@pytest.mark.slow
def test_a_number_that_a_phase_returns_wrong_is_found_and_named():
    config, flipped = override(TRAINED, layers=1, hidden_size=24, heads=3), []
    session = pretraining(config)
    words, labels = batches(config)[0]
    with session:
        with verified(session, config, 7, ALL):
            run_steps(session, config, words, labels, [1e-3])
        names = session._engine._replayer.program._main.__globals__
        (kernel,) = (name for name in names if name.startswith("k_sqrt"))
        plain = names[kernel]

        def wrong_once(t):
            flipped.append(plain(t))
            return flipped[-1] * (1.5 if len(flipped) == 1 else 1.0)

        names[kernel] = wrong_once
        with pytest.raises(CorruptedError) as error:
            with verified(session, config, 7, ALL):
                run_steps(session, config, words, labels, [1e-3])
    assert len(flipped) == 2
    assert named(str(error.value))[1] == "embedding_bwd_phase"


@pytest.mark.parametrize("every, iterations", [(1, 1), (3, 1), (1, 4), (2, 4), (3, 4), (9, 4)])
def test_each_phase_comes_up_again_after_as_many_verifications_as_there_are_phases(
    every, iterations
):
    phases, steps = 13, 13 * every * iterations
    asked = [
        number % phases
        for step in range(0, steps, iterations)
        for number in due(every, step, iterations)
    ]
    assert len(asked) == steps // every
    assert all(
        sorted(asked[i : i + phases]) == list(range(phases)) for i in range(0, len(asked), phases)
    )


FLAGS = """
    --config tiny --name run --hidden_size 24 --heads 3 --steps 4 --warmup_steps 0 --samples 0
    --global_batch_size 4 --micro_batch_size 2 --sequence_length 8 --data_parallel 2
    --tensor_parallel_1 1 --tensor_parallel_2 1 --verify_every 2 --checkpoint.every 1
""".split()


def damage(flips, session, at: int) -> None:
    """From the next call on, the last replica of the run stores something wrong in each."""
    flips.update(at=at, seen=0)
    flips["of"] = next((r for r in session._engine.machine.replicas if r.index == 1), None)


def damaged_run(flips):
    """`run_steps` where the first layer of the decoder leaves a flipped bit in each step."""

    def run(session, *rest):
        damage(flips, session, at=2)
        return run_steps(session, *rest)

    return run


@pytest.mark.slow
def test_a_run_ends_at_the_step_that_verifies_the_damaged_phase(tmp_path, flips, monkeypatch):
    monkeypatch.setattr("popxl_gpt.demo.job.run.run_steps", damaged_run(flips))
    told = "step 2: got other bytes of tensor .*, row .* from phase decoder_fwd_phase, layer 0, on "
    with pytest.raises(CorruptedError, match=told):
        main([*FLAGS, "--run_folder", str(tmp_path)])
    saved = [path.name for path in checkpoints_in(tmp_path / "run" / "checkpoints")]
    assert saved == ["step_00000001"]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
