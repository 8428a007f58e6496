"""`--optimizer muon`: matrices by Muon, everything else by AdamW."""

import numpy as np
import popxl
import pytest
import torch
from helpers.quick import cases

from popxl_gpt.config.presets import override
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.saved_state import Position
from popxl_gpt.execution.checkpoints.saving import save
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.variables import write_whole_weights
from popxl_gpt.utils import runtime
from popxl_gpt.utils.errors import UserError
from tests.integration.gpt_oracle import distance, random_weights
from tests.integration.plain_muon import newton_schulz
from tests.integration.plain_training import TRAINED as PLAIN
from tests.integration.plain_training import train_plainly
from tests.integration.runs import TRAINED, train, train_session
from tests.integration.skipping import GRID, POISON, run, state_of

EXACT = {"precision": "float32", "stochastic_rounding": False, "dropout": 0.0}
EVEN = {"heads": 4, "vocabulary_size": 40}
LAYOUTS = {
    "one": {},
    "all, two steps a run": {**GRID, **EVEN, "micro_batch_size": 2, "device_iterations": 2},
    "dp, whole": {"data_parallel": 2, "replicated_tensor_sharding": False},
    "tp1 of rows that do not divide": {"tensor_parallel_1": 3, "data_parallel": 2, "max_norm": 0.0},
}


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", cases(LAYOUTS, lambda name: name in ("one", "all, two steps a run"))
)
def test_steps_equal_a_plain_pytorch_loop(name):
    config = override(PLAIN, **LAYOUTS[name], optimizer="muon", steps=20, learning_rate=0.01)
    expected, weights = train_plainly(config)
    assert expected[-1].loss < expected[0].loss - 0.3, "the text can be learned"
    results, ours = train(config)
    np.testing.assert_allclose([r.loss for r in results], [e.loss for e in expected], rtol=1e-4)
    compared = [n for n in weights if not n.endswith("qkv.bias")]  # its true gradient is zero
    assert max(distance(ours[n], weights[n]) for n in compared) < 1e-3


def test_an_update_keeps_singular_vectors_and_brings_singular_values_near_one():
    generator = np.random.default_rng(0)
    matrices = generator.standard_normal((3, 24, 16)).astype(np.float32)
    ir = popxl.Ir()
    with ir.main_graph:
        out = popxl.d2h_stream(matrices.shape, popxl.float32)
        popxl.ops.host_store(out, runtime.newton_schulz(popxl.constant(matrices)))
    with popxl.Session(ir, "cpu") as session:
        (found,) = session.run().values()
    for matrix, moved in zip(matrices, found):
        u, s, vt = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
        inside = u.T @ moved @ vt.T
        values = np.diag(inside)
        assert np.abs(inside - np.diag(values)).max() < 1e-4
        assert s.max() / s.min() > 3 and 0.67 < values.min() and values.max() < 1.14
        expected = newton_schulz(torch.from_numpy(matrix.astype(np.float64))).numpy()
        assert np.abs(moved - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.slow
def test_shards_and_whole_matrices_give_the_same_bits():
    """Where the norm, whose sum has another order, scales nothing."""
    several = {"data_parallel": 2, "micro_batch_size": 1, "tensor_parallel_1": 2}
    config = override(TRAINED, **several, **EXACT, optimizer="muon", max_norm=0.0, steps=3)
    results, weights = train(config)
    again, others = train(override(config, replicated_tensor_sharding=False))
    assert [r.loss for r in results] == [r.loss for r in again]
    for name, array in weights.items():
        np.testing.assert_array_equal(array, others[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_step_left_out_keeps_the_sign_of_zeros(precision, poisoned):
    config = override(TRAINED, precision=precision, weight_decay=0.1, optimizer="muon")
    session = pretraining(config)
    weights = random_weights(config.model)
    mixed = {n: np.where(np.abs(w) < np.median(np.abs(w)), -0.0, w) for n, w in weights.items()}
    write_whole_weights(session, config, mixed.items())
    before = state_of(session)
    (result,) = run(session, config, 0, [POISON])
    assert result.is_skipped and state_of(session) == before


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_of_another_layout_and_not_by_another_optimizer(tmp_path):
    config = override(TRAINED, **EXACT, optimizer="muon", steps=4)
    _, session = train_session(config)
    place = save(session, config, tmp_path, Position(4, "data", None, None))
    other = override(config, **GRID)
    restored = pretraining(other)
    SavedRun(place, other).restore(restored)
    again = save(restored, other, tmp_path / "again", Position(4, "data", None, None))
    for file in sorted(path.name for path in place.glob("*.safetensors")):
        assert (place / file).read_bytes() == (again / file).read_bytes(), file
    with pytest.raises(UserError, match="a checkpoint with optimizer muon, not adamw"):
        SavedRun(place, override(config, optimizer="adamw"))
