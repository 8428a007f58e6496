"""`--average_weights`: averages beside the weights, against a plain loop over the weights."""

import numpy as np
import pytest
from helpers.quick import cases

from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.saved_state import Position
from popxl_gpt.execution.checkpoints.saving import save
from popxl_gpt.execution.inference.inference import evaluation
from popxl_gpt.execution.planning.memory import bytes_by_kind, state_bytes
from popxl_gpt.execution.planning.model_size import parameter_count
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.variables import averages, copy_weights, read_weights, whole_tensors
from popxl_gpt.utils.errors import UserError
from tests.integration.gpt_oracle import distance
from tests.integration.runs import TRAINED
from tests.integration.skipping import GRID, POISON, run, session_of, state_of

HORIZON, STEPS = 3, 5
AVERAGED = override(
    TRAINED,
    layers=2, precision="float32", stochastic_rounding=False, dropout=0.0, average_weights=HORIZON, steps=STEPS,
)  # fmt: skip
WAYS = {
    "one": {},
    "all, by muon": {**GRID, "optimizer": "muon"},
    "files": {"memmap_dir": "rows", "host_memory": 2**20, "data_parallel": 2},
    "16 bits": {"precision": "bfloat16", "master_weights": False},
}


def averages_of(session, config: Config) -> "dict[str, np.ndarray]":
    variables = averages(session)
    data = session.get_tensors_data(variables.values())
    found = whole_tensors(config, {name: data[v] for name, v in variables.items()})
    return {name: np.array(array) for name, array in found.items()}


def trained(config: Config, steps: range = range(STEPS)) -> "tuple[object, list, list]":
    """A session, and what each step brings: its loss, and the weights after it."""
    session = session_of(config)
    losses, weights = [], []
    for step in steps:
        (result,) = run(session, config, step, [1e-2])
        losses.append(result.loss)
        weights.append(
            {n: np.array(w, np.float64) for n, w in read_weights(session, config).items()}
        )
    return session, losses, weights


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", cases(WAYS, lambda name: name == "one"))
def test_an_average_is_that_of_a_plain_loop_and_training_has_the_same_bits(
    name, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    config = override(AVERAGED, **WAYS[name])
    session, losses, weights = trained(config)
    expected = weights[0]
    for number, after in enumerate(weights[1:], 2):
        expected = {n: w + (after[n] - w) / min(number, HORIZON) for n, w in expected.items()}
    found = averages_of(session, config)
    assert found.keys() == expected.keys()
    assert max(distance(found[n], array) for n, array in expected.items()) < 1e-6
    _, same_losses, same_weights = trained(override(config, average_weights=0))
    assert losses == same_losses
    for one, other in zip(weights, same_weights):
        assert all(array.tobytes() == other[n].tobytes() for n, array in one.items())


@pytest.mark.slow
def test_what_the_model_is_used_with_is_the_average_from_before_the_first_step_on(tmp_path):
    session = session_of(AVERAGED)
    began = averages_of(session, AVERAGED)
    weights = read_weights(session, AVERAGED)
    assert all(array.tobytes() == weights[n].tobytes() for n, array in began.items())
    for step in range(2):
        run(session, AVERAGED, step, [1e-2])
    expected, forward = averages_of(session, AVERAGED), evaluation(AVERAGED)
    copy_weights(session, forward)
    saved = save(session, AVERAGED, tmp_path, Position(2, "data"))
    for found in (
        read_weights(forward, AVERAGED), dict(SavedRun(saved, AVERAGED).weights())
    ):  # fmt: skip
        assert found.keys() == expected.keys()
        assert all(array.tobytes() == found[n].tobytes() for n, array in expected.items())


@pytest.mark.slow
def test_averages_go_on_from_a_checkpoint_bitwise_and_in_another_layout(tmp_path):
    session, _, _ = trained(AVERAGED, range(3))
    saved = save(session, AVERAGED, tmp_path, Position(3, "data"))
    same, other = pretraining(AVERAGED), pretraining(override(AVERAGED, **GRID))
    SavedRun(saved, AVERAGED).restore(same)
    SavedRun(saved, override(AVERAGED, **GRID)).restore(other)
    begun = averages_of(session, AVERAGED)
    for name, array in averages_of(other, override(AVERAGED, **GRID)).items():
        assert array.tobytes() == begun[name].tobytes()
    for step in range(3, STEPS):
        assert run(session, AVERAGED, step, [1e-2]) == run(same, AVERAGED, step, [1e-2])
        run(other, override(AVERAGED, **GRID), step, [1e-2])
    assert state_of(session) == state_of(same)
    ended = averages_of(session, AVERAGED)
    others = averages_of(other, override(AVERAGED, **GRID))
    compared = [n for n in ended if not n.endswith("qkv.bias")]  # its true gradient is zero
    assert max(distance(others[n], ended[n]) for n in compared) < 1e-4
    with pytest.raises(UserError, match="a checkpoint with average_weights 3, not 0"):
        SavedRun(saved, override(AVERAGED, average_weights=0))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_left_out_changes_no_bit_of_an_average(optimizer, poisoned):
    config = override(AVERAGED, optimizer=optimizer)
    session = session_of(config)
    run(session, config, 0, [1e-2])
    before = state_of(session)
    (result,) = run(session, config, 1, [POISON])
    assert result.is_skipped and state_of(session) == before
    assert any(name.endswith(".average") for name in before)


def test_the_account_of_memory_has_the_averages():
    plain = override(AVERAGED, average_weights=0)
    more = 4 * parameter_count(plain.model)
    assert state_bytes(AVERAGED) - state_bytes(plain) == more
    for kind, size in bytes_by_kind(AVERAGED).items():
        assert size > bytes_by_kind(plain)[kind]
