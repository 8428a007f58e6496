"""Checkpoints, saved and restored within a process."""

import functools
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from helpers.quick import cases

from popxl_gpt.config.presets import override, preset
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.checkpoint_folder import (
    MANIFEST,
    best_in,
    checkpoints_in,
    delete_old,
    folder_name,
)
from popxl_gpt.execution.checkpoints.finding import find
from popxl_gpt.execution.checkpoints.manifest import ManifestError, read_manifest
from popxl_gpt.execution.checkpoints.saved_state import Position
from popxl_gpt.execution.checkpoints.saving import save, write_weights
from popxl_gpt.execution.checkpoints.tensor_files import read_tensors
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.variables import read_weights
from popxl_gpt.utils.errors import UserError
from tests.integration.saved_runs import BASE, train


def state_of(session) -> "dict[str, np.ndarray]":
    variables = session.state.to_dict()
    data = session.get_tensors_data(variables.values())
    return {name: np.array(data[v]) for name, v in variables.items()}


RESTORED = [
    {},
    {"widening": 2},
    {"precision": "bfloat16", "stochastic_rounding": True},
    {"precision": "float16", "stochastic_rounding": True, "loss_scaling": 16.0},
    {"precision": "float16", "master_weights": True, "loss_scaling": "auto"},
    {
        "moment_precision": "bfloat16",
        "gradient_precision": "bfloat16",
        "stochastic_rounding": True,
    },
    {"moment_precision": "8bit", "stochastic_rounding": True},
    {
        "moment_precision": "8bit",
        "precision": "bfloat16",
        "stochastic_rounding": True,
        "data_parallel": 2,
        "tensor_parallel_1": 2,
        "tensor_parallel_2": 2,
    },
    {"data_parallel": 2, "tensor_parallel_1": 2, "tensor_parallel_2": 2},
    {"data_parallel": 2, "tensor_parallel_1": 2, "reduce_precision": "bfloat16"},
    {"layers": 3, "products": "fp8"},
    {"layers": 3, "products": "fp8", "data_parallel": 2, "tensor_parallel_1": 2},
]


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", cases(RESTORED, lambda changes: not changes or "master_weights" in changes)
)
def test_a_restored_session_goes_on_bitwise(changes, tmp_path):
    config = override(BASE, **changes)
    session = pretraining(config)
    train(session, config, range(4))
    saved = save(session, config, tmp_path, Position(4, "data"))
    losses, weights = train(session, config, range(4, 8)), state_of(session)
    other = pretraining(config)
    SavedRun(saved, config).restore(other)
    assert train(other, config, range(4, 8)) == losses
    for name, array in state_of(other).items():
        np.testing.assert_array_equal(array, weights[name], err_msg=name)


@functools.cache
def whole(config: Config) -> "tuple[list[float], dict[str, np.ndarray]]":
    """The losses of eight steps, and the state then."""
    session = pretraining(config)
    return train(session, config, range(8)), state_of(session)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("iterations", [(1, 2), (4, 1), (2, 4)], ids=str)
def test_a_run_goes_on_bitwise_with_other_iterations(iterations, precision, tmp_path):
    narrow = {"moment_precision": "bfloat16", "gradient_precision": "bfloat16"}
    config = override(BASE, precision=precision, stochastic_rounding=True, **narrow)
    expected, weights = whole(config)
    before, after = (override(config, device_iterations=count) for count in iterations)
    first, second = pretraining(before), pretraining(after)
    losses = train(first, before, range(4))
    SavedRun(save(first, before, tmp_path, Position(4, "data")), after).restore(second)
    assert losses + train(second, after, range(4, 8)) == expected
    for name, array in state_of(second).items():
        np.testing.assert_array_equal(array, weights[name], err_msg=name)


@pytest.mark.slow
def test_rounding_at_random_can_begin_in_a_run_that_goes_on(tmp_path):
    session = pretraining(BASE)
    train(session, BASE, range(2))
    rounding = override(BASE, stochastic_rounding=True)
    fresh, restored = pretraining(rounding), pretraining(rounding)
    train(fresh, rounding, range(2))
    SavedRun(save(session, BASE, tmp_path, Position(2, "data")), rounding).restore(restored)
    np.testing.assert_array_equal(*(state_of(one)["rounding_seed"] for one in (fresh, restored)))


NARROW = {"moment_precision": "bfloat16", "stochastic_rounding": True}


@pytest.mark.slow
def test_moments_in_bfloat16_go_on_in_float32_as_they_are(tmp_path, caplog):
    config = override(BASE, **NARROW)
    session = pretraining(config)
    train(session, config, range(3))
    saved, before = save(session, config, tmp_path, Position(3, "data")), state_of(session)
    wide = override(BASE, stochastic_rounding=True)
    other = pretraining(wide)
    SavedRun(saved, wide).restore(other)
    assert "training.moment_precision: bfloat16 -> float32" in caplog.text
    moments = {name: array for name, array in state_of(other).items() if name.endswith("_order")}
    assert any(np.any(array) for array in moments.values())
    for name, array in moments.items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)


EIGHT_BIT = {"moment_precision": "8bit", "stochastic_rounding": True, "dropout": 0.0}
SPLITS = ("data_parallel", "tensor_parallel_1", "tensor_parallel_2")


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("after", [(1, 1, 1), (2, 1, 1), (1, 2, 2)], ids=str)
def test_moments_in_8_bits_go_on_in_any_layout(after, tmp_path):
    """Weights are those that were saved, bit for bit. Moments are coded again in other blocks: of
    numbers that are small beside others of their block the last bits are rounded once more. What
    later steps draw for an element depends on its place in its piece, as with moments of 16 bits.
    """
    config = override(BASE, **EIGHT_BIT, data_parallel=2, tensor_parallel_1=2, tensor_parallel_2=2)
    session = pretraining(config)
    train(session, config, range(3))
    saved, weights = (
        save(session, config, tmp_path, Position(3, "data")),
        read_weights(session, config),
    )
    expected = train(session, config, range(3, 6))
    other = override(config, **dict(zip(SPLITS, after)))
    restored = pretraining(other)
    SavedRun(saved, other).restore(restored)
    for name, array in read_weights(restored, other).items():
        np.testing.assert_array_equal(array, weights[name], err_msg=name)
    again = tmp_path / "again"
    save(restored, other, again, Position(3, "data"))
    for path in saved.glob("*.safetensors"):
        first, second = (read_tensors(p) for p in (path, again / saved.name / path.name))
        for name, array in first.items():
            kept = np.abs(array) > 2.0**-11 * np.abs(array).max(initial=0)
            np.testing.assert_array_equal(array[kept], second[name][kept], err_msg=name)
    losses = train(restored, other, range(3, 6))
    np.testing.assert_allclose(losses[:2], expected[:2], rtol=1e-6)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


@pytest.mark.slow
def test_moments_in_8_bits_go_on_in_float32_as_they_are(tmp_path):
    config, wide = (
        override(BASE, **EIGHT_BIT),
        override(BASE, **{**EIGHT_BIT, "moment_precision": "float32"}),
    )
    session, other = pretraining(config), pretraining(wide)
    train(session, config, range(3))
    saved = save(session, config, tmp_path, Position(3, "data"))
    SavedRun(saved, wide).restore(other)
    again = save(other, wide, tmp_path / "again", Position(3, "data"))
    for path in saved.glob("*.safetensors"):
        first, second = read_tensors(path), read_tensors(again / path.name)
        for name, array in first.items():
            np.testing.assert_array_equal(array, second[name], err_msg=name)
    with pytest.raises(UserError, match="moment_precision float32, not 8bit"):
        SavedRun(again, config)


@pytest.fixture(scope="module")
def fresh():
    """A session of `BASE` that has not trained, for tests that save it."""
    return pretraining(BASE)


@pytest.mark.slow
def test_moments_in_float32_are_not_cut_to_bfloat16(fresh, tmp_path):
    saved = save(fresh, BASE, tmp_path, Position(3, "data"))
    with pytest.raises(
        UserError, match="moment_precision float32, not bfloat16, which would lose some of it"
    ):
        SavedRun(saved, override(BASE, **NARROW))


@pytest.mark.slow
def test_a_setting_that_an_older_run_did_not_have_counts_as_its_default(fresh, tmp_path, caplog):
    """A description of the first format has no checksum and knows no tensors."""
    saved = save(fresh, BASE, tmp_path, Position(3, "data"))
    manifest = json.loads((saved / "checkpoint.json").read_text())
    del manifest["config"]["training"]["moment_precision"], manifest["sha256"]
    for entry in manifest["files"].values():
        del entry["tensors"]
    first = {**manifest, "format": 1, "numerics": "of fewer settings"}
    (saved / "checkpoint.json").write_text(json.dumps(first, indent=1))
    SavedRun(saved, BASE)
    assert not caplog.records
    with pytest.raises(UserError, match="moment_precision float32, not bfloat16"):
        SavedRun(saved, override(BASE, **NARROW))


SPLIT = override(BASE, data_parallel=2, tensor_parallel_1=2, tensor_parallel_2=2, dropout=0.0)


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """A checkpoint of eight replicas after three steps, the weights in it, and the losses of the
    next three.
    """
    session = pretraining(SPLIT)
    train(session, SPLIT, range(3))
    saved = save(session, SPLIT, tmp_path_factory.mktemp("split"), Position(3, "data"))
    weights = {name: np.array(array) for name, array in read_weights(session, SPLIT).items()}
    return saved, weights, train(session, SPLIT, range(3, 6))


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 4, 2), (4, 1, 2)], ids=str)
def test_a_checkpoint_loads_into_another_layout(layout, split, tmp_path):
    (saved, weights, losses), (dp, tp1, tp2) = split, layout
    config = override(SPLIT, data_parallel=dp, tensor_parallel_1=tp1, tensor_parallel_2=tp2)
    other = pretraining(config)
    SavedRun(saved, config).restore(other)
    restored = read_weights(other, config)
    for name, array in weights.items():
        np.testing.assert_array_equal(restored[name], array, err_msg=name)
    again = save(other, config, tmp_path / "again", Position(3, "data"))
    assert hashes(again) == hashes(saved)
    np.testing.assert_allclose(train(other, config, range(3, 6)), losses, rtol=1e-4)


def hashes(folder: Path) -> "dict[str, bytes]":
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.slow
def test_only_the_newest_checkpoints_are_kept(fresh, tmp_path):
    config = override(BASE, keep=2)
    for step in (2, 4, 10, 6):
        save(fresh, config, tmp_path, Position(step, "data"))
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step_00000006", "step_00000010"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000006", "step_00000010"]
    found = find("auto", tmp_path, config)
    assert found is not None and found.position == Position(
        10, "data", tokens=10 * config.tokens_per_step
    )
    assert find("auto", tmp_path / "nothing", config) is None


@pytest.mark.slow
def test_what_killed_runs_left_is_removed_and_never_loaded(fresh, tmp_path):
    (tmp_path / ".step_00000009.partial-123-4").mkdir(parents=True)
    assert find("auto", tmp_path, BASE) is None
    save(fresh, BASE, tmp_path, Position(2, "data"))
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


@pytest.mark.slow
def test_a_file_that_was_made_larger_than_can_be_read_is_refused_by_its_size(fresh, tmp_path):
    folder = save(fresh, BASE, tmp_path, Position(0, "data"))
    path = folder / "decoder.0.safetensors"
    size = path.stat().st_size
    os.truncate(path, 2**40)  # of zeros that take no space
    with pytest.raises(UserError, match=f"got {2**40} bytes.* expected {size}"):
        SavedRun(folder, BASE)


def checked(rest: str) -> str:
    """A description with its checksum."""
    return f'{{\n "sha256": "{hashlib.sha256(rest.encode()).hexdigest()}",\n{rest}'


@pytest.mark.parametrize("loss", ["-1e999", "1e999", '"low"', "true", "1" + 400 * "0"])
def test_a_validation_loss_that_is_no_finite_number_is_never_the_best(tmp_path, loss):
    write_weights(tmp_path, preset("tiny"), iter([("head.weight", np.zeros(3, np.float32))]))
    rest = (tmp_path / MANIFEST).read_text().split("\n", 2)[2]
    found = {
        1: rest,
        2: f' "validation_loss": 2.5,\n{rest}',
        3: f' "validation_loss": {loss},\n{rest}',
        4: f' "format": 99,\n "validation_loss": {loss}\n}}',  # of another version
    }
    for step, text in found.items():
        (tmp_path / folder_name(step)).mkdir()
        (tmp_path / folder_name(step) / MANIFEST).write_text(checked(text))
    assert best_in(tmp_path) == tmp_path / folder_name(2)
    with pytest.raises(ManifestError, match="for validation_loss; expected a number"):
        read_manifest(tmp_path / folder_name(3) / MANIFEST)


def test_only_losses_that_were_measured_as_the_newest_are_compared(tmp_path):
    write_weights(tmp_path, preset("tiny"), iter([("head.weight", np.zeros(3, np.float32))]))
    rest = (tmp_path / MANIFEST).read_text().split("\n", 2)[2]
    found = [(1.0, None), (1.5, "old"), (2.5, "new"), (2.6, "new"), (None, None)]
    for step, (loss, fingerprint) in enumerate(found, start=1):
        named = f' "validation_fingerprint": "{fingerprint}",\n' if fingerprint else ""
        valued = f' "validation_loss": {loss},\n' if loss else ""
        (tmp_path / folder_name(step)).mkdir()
        (tmp_path / folder_name(step) / MANIFEST).write_text(checked(named + valued + rest))
    assert best_in(tmp_path) == tmp_path / folder_name(3)
    delete_old(tmp_path, keep=1)  # the best of each measurement stays
    assert [path.name for path in checkpoints_in(tmp_path)] == [
        folder_name(n) for n in (1, 2, 3, 5)
    ]


@pytest.mark.parametrize("named", ["1", ["1"], [[1]], -1, True, None])
def test_special_tokens_that_are_no_tokens_are_damage(tmp_path, named):
    weights = iter([("head.weight", np.zeros(3, np.float32))])
    write_weights(tmp_path, preset("tiny"), weights, {"eos_token_id": named})
    with pytest.raises(ManifestError, match="for special_tokens.eos_token_id; expected a whole"):
        read_manifest(tmp_path / MANIFEST)


@pytest.mark.parametrize("fingerprint", ["1", "null", '["a"]'])
def test_a_fingerprint_of_a_validation_that_is_no_text_is_damage(tmp_path, fingerprint):
    write_weights(tmp_path, preset("tiny"), iter([("head.weight", np.zeros(3, np.float32))]))
    rest = (tmp_path / MANIFEST).read_text().split("\n", 2)[2]
    text = f' "validation_fingerprint": {fingerprint},\n{rest}'
    (tmp_path / MANIFEST).write_text(checked(text))
    with pytest.raises(ManifestError, match="for validation_fingerprint; expected a text"):
        read_manifest(tmp_path / MANIFEST)
