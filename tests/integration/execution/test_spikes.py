"""`--on_spike`: steps whose gradient norm is far above those before, against a plain loop."""

import math

import numpy as np
import pytest
from helpers.quick import cases

from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.demo.pretraining import main
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.checkpoint_folder import checkpoints_in
from popxl_gpt.execution.checkpoints.saved_state import Position
from popxl_gpt.execution.checkpoints.saving import save
from popxl_gpt.execution.overflow import Skipped
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.reports.metrics import read_metrics
from popxl_gpt.utils.errors import SpikeError
from tests.integration.gpt_oracle import distance
from tests.integration.plain_training import TRAINED as PLAIN
from tests.integration.plain_training import train_plainly
from tests.integration.runs import TRAINED, train
from tests.integration.skipping import (
    GRID,
    POISON,
    flags,
    run,
    session_of,
    state_of,
)

SPIKES = {"on_spike": "skip", "spike_threshold": 1.0, "spike_window": 4}
LAYOUTS = {
    "one": {},
    "five iterations": {"device_iterations": 5},
    "all": {**GRID, "heads": 4, "vocabulary_size": 40, "micro_batch_size": 2},
    "not clipped, whole": {
        "max_norm": 0.0, "data_parallel": 2, "replicated_tensor_sharding": False,
    },
}  # fmt: skip


class PlainSpikes:
    """Which of the norms that come, one after the other, are spikes."""

    def __init__(self, config: Config):
        self.training, self.norms = config.training, []
        self.limits: list[float] = []

    def __call__(self, norm: float) -> bool:
        window, count = self.training.spike_window, len(self.norms)
        limit = math.inf
        if count >= window:  # weights of the norms so far: equal at first, then falling
            weights = np.full(window, 1 / window)
            for _ in range(count - window):
                weights = np.append(weights * (1 - 1 / window), 1 / window)
            mean = np.average(self.norms, weights=weights)
            variance = np.average((np.array(self.norms) - mean) ** 2, weights=weights)
            limit = mean + self.training.spike_threshold * math.sqrt(variance)
        self.limits.append(limit)
        self.norms.append(min(norm, limit))
        return norm > limit


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", cases(LAYOUTS, lambda name: name in ("one", "all")))
def test_spikes_are_left_out_as_in_a_plain_loop(name):
    config = override(PLAIN, **LAYOUTS[name], **SPIKES, steps=20)
    spikes = PlainSpikes(config)
    expected, weights = train_plainly(config, is_spike=spikes)
    found = [e.gradient_norm > limit for e, limit in zip(expected, spikes.limits)]
    assert 2 <= sum(found) <= 8, "some are spikes"
    results, ours = train(config)
    assert [result.is_spike for result in results] == found
    np.testing.assert_allclose([r.norm_limit for r in results], spikes.limits, rtol=1e-3)
    np.testing.assert_allclose([r.loss for r in results], [e.loss for e in expected], rtol=1e-4)
    compared = [n for n in weights if not n.endswith("qkv.bias")]  # its true gradient is zero
    assert max(distance(ours[n], weights[n]) for n in compared) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("changes", cases([{}, GRID], lambda changes: not changes))
def test_a_spike_changes_no_bit_and_an_overflow_none_of_what_is_known_of_norms(changes, poisoned):
    config = override(TRAINED, **changes, **{**SPIKES, "spike_window": 2, "spike_threshold": 0.01})
    session = session_of(config)

    def known() -> "list[float]":
        state = session.state.to_dict()
        return [float(session.get_tensor_data(state[f"norm_{n}"])) for n in ("mean", "variance")]

    run(session, config, 0, [1e-3])
    run(session, config, 1, [1e-3])
    before = known()
    session.write_variables_data({session.state.norm_mean: np.float32(1e-3)})
    bits = state_of(session)
    (spike,) = run(session, config, 2, [1e-3])
    assert spike.is_spike and not spike.is_skipped and state_of(session) == bits
    assert Skipped.of(session) == Skipped(0, 0, 1)
    session.write_variables_data({session.state.norm_mean: np.float32(before[0])})
    before = known()
    (overflow,) = run(session, config, 3, [POISON])
    assert overflow.is_skipped and not overflow.is_spike and known() == before
    assert Skipped.of(session) == Skipped(1, 1, 1)


@pytest.mark.slow
def test_what_is_known_of_norms_goes_on_from_a_checkpoint_bitwise(tmp_path):
    config = override(TRAINED, **SPIKES, steps=12)
    session = session_of(config)
    for step in range(7):
        run(session, config, step, [1e-3])
    other = pretraining(config)
    saved = save(session, config, tmp_path, Position(7, "data"))
    SavedRun(saved, config).restore(other)
    both = [
        [run(one, config, step, [1e-3])[0] for step in range(7, 12)] for one in (session, other)
    ]
    assert both[0] == both[1] and all(math.isfinite(r.norm_limit) for r in both[0])
    assert state_of(session) == state_of(other) and Skipped.of(session) == Skipped.of(other)
    off = override(config, on_spike="off")
    SavedRun(saved, off).restore(pretraining(off))


@pytest.mark.slow
def test_a_run_that_goes_on_with_a_shorter_window_follows_norms_as_that_says():
    config = override(TRAINED, **SPIKES)
    session = session_of(config)
    state = session.state
    known = {state.norm_mean: np.float32(2), state.norm_variance: np.float32(1e4)}
    session.write_variables_data({**known, state.norm_count: np.int32(100)})
    (result,) = run(session, config, 0, [1e-3])
    assert abs(result.gradient_norm - 2) > 1e-3 and not result.is_spike
    np.testing.assert_allclose(
        session.get_tensor_data(state.norm_mean), 2 + (result.gradient_norm - 2) / 4, rtol=1e-6
    )


@pytest.mark.slow
def test_a_run_that_stops_at_a_spike_says_so_saves_and_goes_on(tmp_path, capsys):
    # a window of one step: every norm above the one before it is a spike
    words = flags(tmp_path, "--steps", 12, "--spike_window", 1)
    with pytest.raises(SpikeError, match="got gradient norm .*; expected at most .* is left out"):
        main([*words, "--on_spike", "stop"])
    lines = read_metrics(tmp_path / "tiny/metrics.jsonl")
    step = lines[-1]["step"]
    assert 1 < step < 12 and [line["spikes"] for line in lines] == [0] * (step - 1) + [1]
    (saved,) = checkpoints_in(tmp_path / "tiny/checkpoints")
    assert saved.name == f"step_{step:08}"
    assert main([*words, "--on_spike", "skip", "--checkpoint.load", "auto"]) == 0
    lines = read_metrics(tmp_path / "tiny/metrics.jsonl")
    assert len(lines) == 12 and lines[-1]["spikes"] >= 1
