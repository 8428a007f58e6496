"""The word embedding in parts of its rows."""

import numpy as np
import pytest

from popxl_gpt.config.presets import override
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.saved_state import Position
from popxl_gpt.execution.checkpoints.saving import save
from popxl_gpt.execution.host import run_steps
from popxl_gpt.execution.inference.generation import CachedModel
from popxl_gpt.execution.inference.inference import evaluate, evaluation
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.variables import (
    copy_weights,
    read_gradients,
    read_weights,
    write_whole_weights,
)
from popxl_gpt.modelling.gpt import model_table
from popxl_gpt.modelling.parameters import cut, in_parts, joined
from tests.integration.execution.plan_cases import configuration, planned
from tests.integration.gpt_oracle import distance, random_batch, random_weights, small

ALONE = {"data_parallel": 1, "tensor_parallel_1": 1, "tensor_parallel_2": 1}
LAYOUTS = {
    "tied": ({"tensor_parallel_1": 3, "data_parallel": 2}, 4),  # 13 rows each, two of padding
    "a head of its own": ({"tied_head": False, "tensor_parallel_2": 2, "token_shift": True}, 11),
    "8 bits": (
        {"precision": "bfloat16", "stochastic_rounding": True, "moment_precision": "8bit",
         "tensor_parallel_1": 3, "loss_scaling": 4.0}, 2,
    ),
}  # fmt: skip


def trained(config):
    session = pretraining(config)
    write_whole_weights(session, config, random_weights(config.model).items())
    batch = random_batch(config)
    with session:
        results = [run_steps(session, config, *batch, [0.0])[0] for _ in range(2)]
        gradients = read_gradients(session, config)
        results += run_steps(session, config, *batch, [1e-2])
        results += run_steps(session, config, *batch, [0.0])
    return session, results, gradients


@pytest.mark.parametrize("count", [1, 2, 5, 7])
@pytest.mark.parametrize("tp1", [1, 2, 3])
def test_parts_on_a_replica_are_its_piece_one_after_the_other(count, tp1):
    parameter = model_table(small(hidden_size=4, heads=1).model)["embedding.word.weight"]
    whole = np.random.default_rng(0).random(parameter.shape)
    table, parts = in_parts({"w": parameter}, count, tp1), cut(parameter, whole, count, tp1)
    assert [p.shape for p in table.values()] == [part.shape for part in parts]
    pieces = [p.shard(part, tp1, 1) for p, part in zip(table.values(), parts)]
    assert np.array_equal(np.concatenate(pieces, axis=-2), parameter.shard(whole, tp1, 1))
    assert np.array_equal(joined(parameter, parts, tp1), whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "a head of its own"])
def test_training_with_parts_is_training_without(name):
    changes, count = LAYOUTS[name]
    _, expected, gradients = trained(small(**changes))
    session, found, others = trained(config := small(**changes, embedding_serialisation=count))
    for ours, theirs in zip(found, expected):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=1e-4)
    assert others.keys() == gradients.keys()
    for key, array in gradients.items():
        assert distance(others[key], array) < 1e-5, key
    parts = [name for name in session.state.weights.to_dict() if ".word.weight." in name]
    assert len(parts) == count
    assert {n: a.shape for n, a in read_weights(session, config).items()} == {
        n: p.shape for n, p in model_table(config.model).items()
    }


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_is_the_same_whatever_the_parts(name, tmp_path):
    changes, count = LAYOUTS[name]
    config = small(**changes, embedding_serialisation=count)
    session, _, _ = trained(config)
    with session:
        folder = save(session, config, tmp_path / "parts", Position(1, "data"))
    whole = override(config, **ALONE, embedding_serialisation=1)
    other = pretraining(whole)
    with other:
        SavedRun(folder, whole).restore(other)
        assert read_weights(other, whole).keys() == model_table(whole.model).keys()
        again = save(other, whole, tmp_path / "whole", Position(1, "data"))
    third = pretraining(config)
    with third:
        SavedRun(again, config).restore(third)
        back = save(third, config, tmp_path / "back", Position(1, "data"))
    for file in folder.glob("*.safetensors"):
        if name != "8 bits":  # whose numbers share exponents with others of their piece
            assert file.read_bytes() == (again / file.name).read_bytes(), file.name
            assert file.read_bytes() == (back / file.name).read_bytes(), file.name
    kept, loaded = (read_weights(each, config) for each in (session, third))
    assert all(np.array_equal(kept[key], loaded[key]) for key in kept)


@pytest.mark.slow
def test_validation_and_texts_take_the_weights_in_parts():
    config = small(tensor_parallel_1=3, embedding_serialisation=4)
    session, found, _ = trained(config)
    validation, cached = evaluation(config), CachedModel(config, 2, 3, 2)
    for target in (validation, cached.session):
        copy_weights(session, target)
    with validation:
        loss = evaluate(validation, config, *random_batch(config))
    assert loss == pytest.approx(found[-1].loss, rel=1e-5)
    plain = CachedModel(whole := small(), 2, 3, 2)
    write_whole_weights(plain.session, whole, read_weights(session, config).items())
    with cached.session, plain.session:
        texts = [[1, 2, 3], [30]]
        assert distance(cached.start(texts), plain.start(texts)) < 1e-5


@pytest.mark.slow
def test_the_plan_of_an_update_by_parts_takes_less_memory():
    config = configuration(vocabulary_size=4000)
    whole, parts = (
        {phase.name: phase.peak_bytes for phase in planned(each).program.phases}
        for each in (config, override(config, embedding_serialisation=8))
    )
    table = 4 * 4000 * config.model.hidden_size
    assert max(whole, key=whole.__getitem__) == "embedding_bwd_phase"
    assert whole["embedding_bwd_phase"] > 4 * table
    assert parts["embedding_bwd_phase"] < 1.5 * table
    assert max(parts, key=parts.__getitem__) == "head_phase"
