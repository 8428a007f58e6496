"""Steps whose gradient norm is not finite change nothing, in every layout, and runs that have no
others say so.
"""

import functools
import html
import json
import math
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from helpers.quick import cases
from safetensors.numpy import load_file

from popxl_gpt.config.presets import override
from popxl_gpt.config.schedules import learning_rate
from popxl_gpt.demo.pretraining import main
from popxl_gpt.execution import optimizer
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.checkpoint_folder import MANIFEST, checkpoints_in
from popxl_gpt.execution.checkpoints.saved_state import Position
from popxl_gpt.execution.checkpoints.saving import save
from popxl_gpt.execution.host import StepResult
from popxl_gpt.execution.overflow import COUNTERS, Skipped
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.reports.metrics import MetricsFile, read_metrics
from popxl_gpt.execution.variables import read_weights
from popxl_gpt.utils.errors import ConfigError, DivergedError, NotFiniteError, UserError
from tests import warm
from tests.faults import json_entry, tensors_changed
from tests.integration.gpt_oracle import distance, small
from tests.integration.plain_training import TRAINED as PLAIN
from tests.integration.plain_training import train_plainly
from tests.integration.runs import TRAINED as THREE_LAYERS
from tests.integration.skipping import (
    DP_TP1,
    DP_TP2,
    GRID,
    POISON,
    flags,
    run,
    session_of,
    state_of,
)

ROOT = Path(__file__).parents[3]
TRAINED = override(THREE_LAYERS, layers=2)
EXACT = override(TRAINED, precision="float32", stochastic_rounding=False, dropout=0.0)
LAYOUTS = {
    "bfloat16, rounded at random": TRAINED,
    "float16": override(
        TRAINED, precision="float16", loss_scaling=64.0, moment_precision="bfloat16"
    ),
    "float16, rounded to nearest": override(
        TRAINED, precision="float16", stochastic_rounding=False
    ),
    "float32": EXACT,
    "moments in 8 bits, gradients in 16": override(
        TRAINED, moment_precision="8bit", gradient_precision="bfloat16"
    ),
    "dp and tp1, moments in 8 bits": override(
        EXACT, **DP_TP1, moment_precision="8bit", stochastic_rounding=True
    ),
    "without clipping, keeping activations": override(
        EXACT, max_norm=0.0, recomputation=False, widening=2
    ),
    "dp": override(TRAINED, data_parallel=2, micro_batch_size=1),
    "dp, whole": override(
        EXACT, data_parallel=2, micro_batch_size=1, replicated_tensor_sharding=False
    ),
    "tp1": override(TRAINED, tensor_parallel_1=2),
    "tp2": override(EXACT, tensor_parallel_2=2),
    "all": override(TRAINED, **GRID),
    "all, muon": override(EXACT, **GRID, optimizer="muon"),
    "muon, moments in bfloat16": override(TRAINED, optimizer="muon", moment_precision="bfloat16"),
    "dp and tp2, float16": override(TRAINED, **DP_TP2, precision="float16", loss_scaling=64.0),
    "dp and tp1, whole": override(EXACT, **DP_TP1, replicated_tensor_sharding=False),
}
every_layout = pytest.mark.parametrize(
    "name", cases(LAYOUTS, lambda name: name in ("float32", "dp"))
)


RATES = [1e-3, POISON, POISON, 1e-3, 1e-3, POISON]


class OneByOne(NamedTuple):
    """What steps at `RATES` give in a program of one step, and what they leave behind."""

    results: "list[StepResult]"
    states: "list[dict[str, bytes]]"
    """Before the first step, and after each."""
    counts: "list[Skipped]"
    """As the states."""


@functools.cache
def one_by_one(name: str) -> OneByOne:
    """Of a layout, for a test with `poisoned`: several compare with it."""
    config = override(LAYOUTS[name], steps=len(RATES))
    session = session_of(config)
    found = OneByOne([], [state_of(session)], [Skipped.of(session)])
    for step, rate in enumerate(RATES):
        found.results.extend(run(session, config, step, [rate]))
        found.states.append(state_of(session))
        found.counts.append(Skipped.of(session))
    return found


@pytest.mark.sampled(3)
@pytest.mark.slow
@every_layout
def test_a_step_with_an_infinite_gradient_changes_no_bit_of_the_state(name, poisoned):
    results, states, counts = one_by_one(name)
    assert [result.is_skipped for result in results] == [rate == POISON for rate in RATES]
    for number, result in enumerate(results):
        if result.is_skipped:
            assert result.gradient_norm == math.inf and math.isfinite(result.loss)
            assert states[number + 1] == states[number]
    changing = [name for name in states[0] if name.endswith(("_order", ".step"))]
    for before, after in ((states[3], states[4]), (states[4], states[5])):
        assert changing and all(after[name] != before[name] for name in changing)
    assert counts == [Skipped(*c) for c in ((0, 0), (0, 0), (1, 1), (2, 2), (2, 0), (2, 0), (3, 1))]


@pytest.mark.sampled(5)
@pytest.mark.slow
@every_layout
def test_skipped_steps_are_the_same_with_several_device_iterations(name, poisoned):
    expected = one_by_one(name)
    config = override(LAYOUTS[name], steps=len(RATES), device_iterations=3)
    session = session_of(config)
    results = [r for i in (0, 3) for r in run(session, config, i, RATES[i : i + 3])]
    assert results == expected.results
    assert state_of(session) == expected.states[-1]
    assert Skipped.of(session) == expected.counts[-1]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    cases(
        [{}, {"device_iterations": 4}, {**GRID, "heads": 4, "global_batch_size": 4}],
        lambda changes: not changes,
        ["plain", "iterations", "grid"],
    ),
)
def test_a_run_with_skipped_steps_equals_a_plain_loop_that_leaves_them_out(changes, poisoned):
    config, skipped = override(PLAIN, steps=8, warmup_steps=2, **changes), {2, 3, 4}
    rates = [
        POISON if step in skipped else learning_rate(config.training, step) for step in range(8)
    ]
    iterations = config.execution.device_iterations
    session = session_of(config)
    results = [
        r
        for i in range(0, 8, iterations)
        for r in run(session, config, i, rates[i : i + iterations])
    ]
    assert {step for step, result in enumerate(results) if result.is_skipped} == skipped
    expected, weights = train_plainly(config, skipped)
    np.testing.assert_allclose([r.loss for r in results], [r.loss for r in expected], rtol=1e-4)
    found = read_weights(session, config)
    # whose key's part has no gradient
    compared = [name for name in weights if not name.endswith("qkv.bias")]
    assert max(distance(found[name], weights[name]) for name in compared) < 1e-4


UNROUNDED = [name for name, config in LAYOUTS.items() if not config.training.stochastic_rounding]


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", cases(UNROUNDED, lambda name: name == "float32"))
def test_plain_popxls_optimizer_skips_with_the_same_bits(name, poisoned, monkeypatch):
    """Its updates always happen, so the application puts back what was there. What is rounded at
    random draws anew.
    """
    expected = one_by_one(name)
    monkeypatch.setattr(optimizer, "update_condition", dict)
    config = override(LAYOUTS[name], steps=len(RATES))
    session = session_of(config)
    results = [r for i, rate in enumerate(RATES) for r in run(session, config, i, [rate])]
    assert results == expected.results
    assert state_of(session) == expected.states[-1]


@pytest.mark.slow
@pytest.mark.parametrize("iterations", [1, 3])
def test_a_learning_rate_without_sense_leaves_finite_weights(iterations):
    config = override(TRAINED, steps=6, device_iterations=iterations, precision="float32")
    session = session_of(config)
    results = [
        r for i in range(0, 6, iterations) for r in run(session, config, i, [1e30] * iterations)
    ]
    assert [result.is_skipped for result in results] == [False] + [True] * 5
    assert Skipped.of(session) == Skipped(5, 5)
    assert all(np.isfinite(array).all() for array in read_weights(session, config).values())


@pytest.mark.slow
def test_a_loss_scaling_that_overflows_leaves_fresh_weights():
    config = override(TRAINED, precision="float16", loss_scaling=3e5)
    session = session_of(config)
    before = state_of(session)
    (result,) = run(session, config, 0, [1e-3])
    assert result.is_skipped and math.isfinite(result.loss)
    assert state_of(session) == before


@pytest.mark.slow
@pytest.mark.parametrize("max_norm", [0.0, 1e30])
def test_a_norm_that_nothing_reaches_changes_no_bit(max_norm):
    configs = (override(EXACT, max_norm=limit) for limit in (1e3, max_norm))
    first, second = ([session := session_of(c), run(session, c, 0, [1e-3])] for c in configs)
    assert first[1] == second[1] and state_of(first[0]) == state_of(second[0])


@pytest.mark.slow
def test_gradients_are_clipped_to_the_smallest_norm():
    config = override(EXACT, max_norm=1e-30, weight_decay=0.0)
    session = session_of(config)
    before = read_weights(session, config)
    run(session, config, 0, [1e-3])
    assert (
        max(
            np.abs(array - before[name]).max()
            for name, array in read_weights(session, config).items()
        )
        < 1e-9
    )


@pytest.mark.parametrize(
    "name, value, says",
    [
        (
            "max_norm",
            1e39,
            r"max_norm: got 1e\+39; expected a number, 0, or at least 1e-30 and at most 1e\+30",
        ),
        ("max_norm", 1e-45, r"max_norm: got 1e-45; expected a number, 0, or at least 1e-30"),
        (
            "loss_scaling",
            1e-37,
            r"loss_scaling: got 1e-37; expected a number, at least 1e-06 and at most 1e\+12",
        ),
        ("loss_scaling", 1e-300, r"loss_scaling: got 1e-300; expected a number, at least 1e-06"),
        (
            "loss_scaling",
            1e39,
            r"loss_scaling: got 1e\+39; expected a number, at least 1e-06 and at most 1e\+12",
        ),
    ],
)
def test_numbers_that_float32_cannot_divide_by_are_refused(name, value, says):
    with pytest.raises(ConfigError, match=says):
        override(TRAINED, **{name: value})


# Runs


def strictly(line: str) -> dict:
    def refuse(word: str) -> None:
        raise ValueError(word)

    return json.loads(line, parse_constant=refuse)


@pytest.mark.slow
def test_a_diverged_run_ends_in_words_with_an_exit_code_of_its_own(tmp_path):
    words = flags(
        tmp_path, "--checkpoint.every", 1, "--checkpoint.keep", 1, "--learning_rate", 1e30
    )
    command = [warm.python(), str(ROOT / "demo/pretraining.py"), *words, "--max_skipped", "4"]
    ended = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 3, ended.stderr
    assert (
        "diverged: step 5: got 4 steps in a row whose gradient norm is not finite" in ended.stderr
    )
    assert "Traceback" not in ended.stderr and "4 skipped" in ended.stdout
    told = json.loads((tmp_path / "tiny/warnings.jsonl").read_text().splitlines()[-1])["text"]
    assert told.startswith("step 5: got 4 steps in a row") and f"diverged: {told}" in ended.stderr
    assert html.escape(told) in (tmp_path / "tiny/report.html").read_text()
    lines = [strictly(line) for line in (tmp_path / "tiny/metrics.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines] == [0, 1, 2, 3, 4]
    assert lines[4]["loss"] is None and lines[4]["not_finite"] == {
        "loss": "nan",
        "gradient_norm": "nan",
    }
    assert "not_finite" not in lines[0] and lines[0]["loss"] > 0
    kept = checkpoints_in(tmp_path / "tiny/checkpoints")
    # what is before stays
    assert [path.name for path in kept] == ["step_00000001", "step_00000005"]


@pytest.mark.slow
def test_a_run_whose_last_steps_have_no_loss_has_not_succeeded(tmp_path):
    with pytest.raises(DivergedError, match="step 3, the last: got loss nan"):
        main(flags(tmp_path, "--steps", 3, "--learning_rate", 1e30))
    (saved,) = checkpoints_in(tmp_path / "tiny/checkpoints")
    words = (
        "--steps",
        9,
        "--learning_rate",
        1e30,
        "--max_skipped",
        5,
        "--checkpoint.load",
        saved,
        "--name",
        "on",
    )
    # those before it was stopped count
    with pytest.raises(DivergedError, match="step 6: got 5 steps in a row"):
        main(flags(tmp_path, *words))
    metrics = read_metrics(tmp_path / "on/metrics.jsonl")
    assert [line["skipped"] for line in metrics] == [3, 4, 5] and math.isnan(metrics[-1]["loss"])


def test_metrics_keep_what_a_null_stands_for(tmp_path):
    values = {
        "step": 1,
        "loss": math.nan,
        "validation_loss": None,
        "gradient_norm": math.inf,
        "learning_rate": -math.inf,
    }
    good = {**values, "step": 2, "loss": 1.5, "gradient_norm": 0.5, "learning_rate": 1e-3}
    with_file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    with_file.write(values)
    with_file.write(good)
    with_file.close()
    first, second = (
        strictly(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    )
    assert (
        first["not_finite"] == {"loss": "nan", "gradient_norm": "inf", "learning_rate": "-inf"}
        and second["loss"] == 1.5
    )
    found, _ = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(found.pop("loss")) and math.isnan(values.pop("loss")) and found == values
    reopened = MetricsFile(tmp_path / "metrics.jsonl", 1)
    reopened.close()
    assert reopened.last["gradient_norm"] == math.inf


# Checkpoints

SAVED = small(steps=4)


@pytest.fixture(scope="module")
def saved_session():
    """A session that has not trained, for tests that read its state, write it or restore it."""
    return session_of(SAVED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tensor", ["weights.decoder.1.attention.qkv.weight", "optimizer.head.norm.bias.second_order"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_saved_and_nothing_is_deleted(
    tensor, value, tmp_path, saved_session
):
    config, session = override(SAVED, keep=1), saved_session
    before = save(session, config, tmp_path, Position(1, "data"))
    variable = session.state.to_dict()[tensor]
    data = np.array(session.get_tensor_data(variable))
    data.reshape(-1)[-1] = value
    session.write_variables_data({variable: data})
    with pytest.raises(DivergedError, match="got numbers that are not finite after step 2"):
        save(session, config, tmp_path, Position(2, "data"))
    assert list(tmp_path.iterdir()) == [before]
    SavedRun(before, config).restore(session)
    assert np.isfinite(session.get_tensor_data(variable)).all()


def altered(folder: Path, name: str, change) -> None:
    """Change a tensor of a checkpoint's embedding, with right checksums."""
    file = "embedding.safetensors"
    tensors_changed(file, **{name: change(load_file(folder / file)[name])})(folder)


def filled(value: float):
    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array.reshape(-1)[3] = value
        return array

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, change, says",
    [
        (
            "weights.word.weight",
            lambda a: a.astype(np.float64),
            "got float64; expected float32 or float16",
        ),
        ("weights.word.weight", lambda a: a.astype(np.int32), "got int32"),
        ("optimizer.word.weight.first_order", lambda a: a > 0, "got bool"),
        ("weights.position.weight", filled(math.nan), "got numbers that are not finite"),
        (
            "optimizer.position.weight.second_order",
            filled(-math.inf),
            "got numbers that are not finite",
        ),
        ("optimizer.word.weight.step", lambda a: a.astype(np.int64), "got int64"),
        ("weights.word.weight", lambda a: a[:-1], r"got shape \(36, 24\); expected \(37, 24\)"),
        ("optimizer.word.weight.step", lambda a: a.reshape(1), r"got shape \(1,\); expected \(\)"),
    ],
)
def test_tensors_that_no_run_saves_are_refused_by_file_and_name(
    name, change, says, tmp_path, saved_session
):
    session = saved_session
    saved = save(session, SAVED, tmp_path, Position(1, "data"))
    altered(saved, name, change)
    with pytest.raises(UserError, match=rf"embedding\.safetensors, {name}: {says}"):
        SavedRun(saved, SAVED).restore(session)
    if name.startswith("weights."):
        wrong = rf"embedding\.safetensors, {name}: {says}"
        with pytest.raises((UserError, NotFiniteError), match=wrong):
            dict(SavedRun(saved, SAVED).weights())


@pytest.mark.slow
def test_weights_beyond_float16_are_refused(tmp_path, saved_session):
    saved = save(saved_session, SAVED, tmp_path, Position(1, "data"))
    altered(saved, "weights.word.weight", filled(1e6))
    narrow = override(SAVED, precision="float16")
    with pytest.raises(
        UserError, match=r"weights\.word\.weight: got numbers beyond float16's largest, 65504"
    ):
        SavedRun(saved, narrow).restore(pretraining(narrow))


@pytest.mark.slow
def test_counts_of_skipped_steps_go_on_from_a_checkpoint(tmp_path, poisoned):
    config = override(SAVED, device_iterations=2)
    session = session_of(config)
    run(session, config, 0, [1e-3, POISON])
    saved = save(session, config, tmp_path, Position(2, "data"))
    other = pretraining(config)
    SavedRun(saved, config).restore(other)
    assert Skipped.of(other) == Skipped(1, 1) and state_of(other) == state_of(session)
    run(other, config, 2, [POISON, 1e-3])
    assert Skipped.of(other) == Skipped(2, 0)
    for name in COUNTERS:  # as in checkpoints of earlier versions
        json_entry(MANIFEST, name)(saved)
    SavedRun(saved, config).restore(other)
    assert Skipped.of(other) == Skipped(0, 0)
