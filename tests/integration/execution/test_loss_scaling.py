"""`--loss_scaling auto`: the program finds the loss scale, with the bits of a plain loop around
fixed ones.
"""

import functools
import json
import math
import shutil

import numpy as np
import pytest
from helpers.quick import cases

from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.demo.pretraining import main
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.checkpoint_folder import MANIFEST
from popxl_gpt.execution.checkpoints.saved_state import Position
from popxl_gpt.execution.checkpoints.saving import save
from popxl_gpt.execution.host import StepResult
from popxl_gpt.execution.overflow import CEILING, COUNTED, FLOOR, INITIAL
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.reports.metrics import read_metrics
from popxl_gpt.utils.errors import ConfigError, DivergedError, UserError
from tests.faults import json_changed
from tests.integration.runs import TRAINED
from tests.integration.skipping import DP_TP1, DP_TP2, flags, run, session_of, state_of

WINDOW, STEPS = 2, 12
HALF = override(
    TRAINED, layers=2, precision="float16", stochastic_rounding=True, steps=STEPS, max_norm=0.5,
    widening=2,
)  # fmt: skip
AUTO = {"loss_scaling": "auto", "loss_scaling_window": WINDOW}
LAYOUTS = {
    "one": {},
    "three iterations": {"device_iterations": 3},
    "dp": {"data_parallel": 2, "micro_batch_size": 1, "device_iterations": 2},
    "tp2, keeping activations": {"tensor_parallel_2": 2, "recomputation": False},
    "dp and tp2": DP_TP2,
    "dp and tp1, whole": {
        **DP_TP1,
        "replicated_tensor_sharding": False,
        "device_iterations": 3,
    },
    "not clipped, rounded to nearest": {"max_norm": 0.0, "stochastic_rounding": False},
}
every_layout = pytest.mark.parametrize(
    "name", cases(LAYOUTS, lambda name: name == "three iterations")
)


def all_steps(session, config: Config) -> "list[StepResult]":
    iterations = config.execution.device_iterations
    return [
        r for i in range(0, STEPS, iterations) for r in run(session, config, i, [1e-3] * iterations)
    ]


def hand_over(source, target) -> None:
    """Give a session the state of another: weights, moments, seeds and counters."""
    theirs = source.state.to_dict()
    target.write_variables_data(
        {
            v: source.get_tensor_data(theirs[name])
            for name, v in target.state.to_dict().items()
            if name in theirs
        }
    )


@functools.cache
def plain_loop(config: Config) -> "tuple[list[StepResult], dict[str, bytes]]":
    """Steps of programs of one step with a fixed loss scale, one program for each, and the state
    after them.
    """
    programs, results, scale, good, last = {}, [], INITIAL, 0, None
    for step in range(STEPS):
        fixed = override(config, loss_scaling=scale)
        if scale not in programs:
            programs[scale] = session_of(fixed)
        if last is not None and last is not programs[scale]:
            hand_over(last, programs[scale])
        last = programs[scale]
        (result,) = run(last, fixed, step, [1e-3])
        results.append(StepResult(result.loss, result.gradient_norm, scale, labels=result.labels))
        good = 0 if result.is_skipped else good + 1
        if result.is_skipped:
            scale /= 2
        elif good == WINDOW:
            scale, good = scale * 2, 0
    return results, state_of(last)


@pytest.mark.sampled(3)
@pytest.mark.slow
@every_layout
def test_a_scale_that_the_program_finds_gives_the_bits_of_a_plain_loop(name):
    config = override(HALF, **LAYOUTS[name])
    expected, state = plain_loop(override(config, device_iterations=1))
    assert 2 <= sum(result.is_skipped for result in expected) < STEPS / 2, "some steps overflow"
    auto = override(config, **AUTO)
    session = session_of(auto)
    assert str(all_steps(session, auto)) == str(expected)  # among the norms may be NaN
    assert state_of(session) == state


@pytest.mark.slow
def test_bfloat16_takes_a_scale_too():
    auto = override(TRAINED, steps=4, **AUTO)
    session, fixed = session_of(auto), session_of(override(TRAINED, loss_scaling=INITIAL))
    for step, scale in enumerate((INITIAL, INITIAL, 2 * INITIAL, 2 * INITIAL)):
        (result,) = run(session, auto, step, [1e-3])
        assert result.loss_scale == scale
        if scale == INITIAL:
            (expected,) = run(fixed, override(TRAINED, loss_scaling=INITIAL), step, [1e-3])
            assert (result.loss, result.gradient_norm) == (expected.loss, expected.gradient_norm)


@pytest.mark.slow
def test_the_scale_stays_between_its_limits():
    config = override(HALF, **AUTO)
    session = session_of(config)
    state = session.state
    session.write_variables_data({state.loss_scale: np.float32(CEILING)})
    (result,) = run(session, config, 0, [1e-3])
    assert result.is_skipped and session.get_tensor_data(state.loss_scale) == CEILING / 2
    session.write_variables_data(
        {state.loss_scale: np.float32(FLOOR), state.good_steps: np.int32(WINDOW - 1)}
    )
    (result,) = run(session, config, 1, [1e-3])
    assert not result.is_skipped
    assert (
        session.get_tensor_data(state.loss_scale),
        session.get_tensor_data(state.good_steps),
    ) == (2 * FLOOR, 0)
    wide = override(TRAINED, **AUTO, learning_rate=1e30)
    session = session_of(wide)
    session.write_variables_data(
        {session.state.loss_scale: np.float32(CEILING), session.state.good_steps: np.int32(1)}
    )
    run(session, wide, 0, [1e30])
    assert session.get_tensor_data(session.state.loss_scale) == CEILING
    session.write_variables_data({session.state.loss_scale: np.float32(FLOOR)})
    (result,) = run(session, wide, 1, [1e30])
    assert result.is_skipped and session.get_tensor_data(session.state.loss_scale) == FLOOR


@pytest.mark.slow
def test_a_run_that_goes_on_with_a_shorter_window_grows_its_scale_at_once():
    config = override(HALF, **AUTO)
    session = session_of(config)
    state = session.state
    session.write_variables_data({state.good_steps: np.int32(WINDOW + 5)})
    run(session, config, 0, [1e-3])
    assert session.get_tensor_data(state.loss_scale) == 2 * INITIAL
    assert session.get_tensor_data(state.good_steps) == 0


@pytest.mark.slow
def test_the_scale_goes_on_from_a_checkpoint(tmp_path):
    config = override(HALF, **AUTO)
    session = session_of(config)
    whole = all_steps(session, config)
    first, second = session_of(config), pretraining(config)
    for step in range(7):
        run(first, config, step, [1e-3])
    saved = save(first, config, tmp_path, Position(7, "data"))
    manifest = json.loads((saved / MANIFEST).read_text())
    assert manifest["loss_scale"] == whole[7].loss_scale and manifest["good_steps"] < WINDOW
    SavedRun(saved, config).restore(second)
    assert str(
        [result for step in range(7, STEPS) for result in run(second, config, step, [1e-3])]
    ) == str(whole[7:])
    assert state_of(second) == state_of(session)
    fixed = override(config, loss_scaling=8.0)  # there and back again
    other = pretraining(fixed)
    SavedRun(saved, fixed).restore(other)
    again = save(other, fixed, tmp_path / "fixed", Position(8, "data"))
    SavedRun(again, config).restore(second)
    assert second.get_tensor_data(second.state.loss_scale) == INITIAL


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, value",
    [
        ("loss_scale", 3.0),
        ("loss_scale", 0.5),
        ("loss_scale", 2.0**25),
        ("loss_scale", math.nan),
        ("loss_scale", [2.0]),
    ]
    + [
        (name, value)
        for name in COUNTED
        if name not in ("loss_scale", "norm_mean", "norm_variance")
        for value in (-1, 1.5, 2**40, True, "1", None)
    ],
)
def test_counts_that_no_program_comes_to_are_refused(name, value, tmp_path, saved_run):
    folder, config = saved_run
    changed = tmp_path / folder.name
    changed.mkdir()
    shutil.copy(folder / MANIFEST, changed)
    json_changed(MANIFEST, **{name: value})(changed)
    with pytest.raises(UserError, match="got no (count that a run comes to|JSON \\(NaN)"):
        SavedRun(changed, config)


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    config = override(HALF, **AUTO)
    return save(
        session_of(config), config, tmp_path_factory.mktemp("saved"), Position(1, "data")
    ), config


@pytest.mark.slow
def test_a_run_whose_scale_is_at_its_floor_ends(tmp_path):
    words = (
        "--precision",
        "float16",
        "--loss_scaling",
        "auto",
        "--learning_rate",
        1e3,
        "--max_skipped",
        99,
    )
    with pytest.raises(DivergedError, match="not finite with loss scale 1, the smallest"):
        main(flags(tmp_path, *words, "--steps", 60))
    metrics = read_metrics(tmp_path / "tiny/metrics.jsonl")
    scales = [line["loss_scale"] for line in metrics if line["skipped"]]
    assert scales == [2.0**power for power in range(16, -1, -1)][-len(scales) :]


@pytest.mark.parametrize(
    "changes, says",
    [
        (
            {"loss_scaling": "auto"},
            "loss_scaling: got auto while precision is float32; expected a number",
        ),
        (
            {"loss_scaling": "automatic"},
            "loss_scaling: got 'automatic'; expected a number, at least 1e-06 and at most",
        ),
        (
            {"loss_scaling_window": 0},
            "loss_scaling_window: got 0; expected a whole number, at least 1",
        ),
    ],
)
def test_what_is_no_loss_scaling_is_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        override(TRAINED, precision="float32", stochastic_rounding=False, **changes)
