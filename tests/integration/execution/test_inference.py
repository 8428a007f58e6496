"""Programs that only run forward."""

import numpy as np
import pytest
from helpers.quick import cases

from popxl_gpt.config.presets import override
from popxl_gpt.data.in_memory import SyntheticDataset
from popxl_gpt.execution.host import run_steps
from popxl_gpt.execution.inference.evaluation import Evaluation
from popxl_gpt.execution.inference.generation import CachedModel
from popxl_gpt.execution.inference.inference import evaluate, evaluation, generation, logits
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.variables import copy_weights, write_whole_weights
from tests.integration.gpt_oracle import distance, expect, random_batch, random_weights, small

EVALUATED = [
    {},
    {"tensor_parallel_1": 3},
    {"data_parallel": 2, "micro_batch_size": 2},
    {"data_parallel": 2, "widening": 2},
    {"precision": "bfloat16"},
    {"precision": "float16", "tensor_parallel_2": 2},
]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", cases(EVALUATED, lambda changes: "widening" in changes or "precision" in changes)
)
def test_the_loss_of_a_batch_is_the_training_programs(changes):
    config = small(**changes)
    training, evaluating = pretraining(config), evaluation(config)
    write_whole_weights(training, config, random_weights(config.model).items())
    copy_weights(training, evaluating)
    batch = random_batch(config)
    with evaluating:
        loss = evaluate(evaluating, config, *batch)
    with training:
        (step,) = run_steps(training, config, *batch, [0.0])
    assert loss == pytest.approx(step.loss, rel=1e-6)


OTHERWISE = [
    {"inference_data_parallel": 3, "inference_micro_batch_size": 2},
    {"inference_device_iterations": 2, "inference_head_serialisation": 4},
    {"device_iterations": 3, "inference_data_parallel": 1, "inference_micro_batch_size": 5},
]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("changes", OTHERWISE)
def test_validation_is_executed_otherwise_than_training_with_the_same_result(changes):
    changes = {"data_parallel": 2, "tensor_parallel_1": 3, "steps": 6, **changes}
    dataset, found = SyntheticDataset(12, 37, samples=400), {}
    for name, config in (("same", small(data_parallel=2)), ("other", small(**changes))):
        training, session = pretraining(config), evaluation(config)
        write_whole_weights(training, config, random_weights(config.model).items())
        copy_weights(training, session)
        found[name] = Evaluation(session, config, dataset, 3)
    same, other = (found[name].measure() for name in ("same", "other"))
    assert np.array_equal(found["same"].samples, found["other"].samples)
    assert other.loss == pytest.approx(same.loss, rel=1e-6)
    assert other.standard_error == pytest.approx(same.standard_error, rel=1e-4)
    own = config.in_inference
    assert session.ir.replication_factor == own.execution.replication_factor
    assert session.ir.num_host_transfers == own.execution.device_iterations * own.runs_per_phase


@pytest.mark.slow
def test_texts_are_written_by_the_replicas_of_inference():
    config = small(data_parallel=2, inference_data_parallel=3)
    model = CachedModel(config, 3, 4, 2)
    assert model.session.ir.replication_factor == 3
    write_whole_weights(model.session, config, random_weights(config.model).items())
    prompts = [[1, 2, 3], [4], [5, 6]]
    with model.session:
        found = model.start(prompts)
    one = CachedModel(small(), 3, 4, 2)
    write_whole_weights(one.session, config, random_weights(config.model).items())
    with one.session:
        assert distance(found, one.start(prompts)) < 1e-5


@pytest.mark.slow
def test_evaluation_drops_no_units():
    config = small(dropout=0.5)
    session = evaluation(config)
    write_whole_weights(session, config, random_weights(config.model).items())
    words, labels = random_batch(config)
    with session:
        loss = evaluate(session, config, words, labels)
    assert loss == pytest.approx(
        expect(config.model, random_weights(config.model), words, labels).loss, rel=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("widening", [1, 4])
def test_logits_of_one_row_are_those_of_the_whole_sequence(widening):
    config = override(small(), tensor_parallel_1=3, widening=widening)
    session = generation(config, rows=1)
    write_whole_weights(session, config, random_weights(config.model).items())
    words, labels = random_batch(config)
    last = np.array([[3], [0], [11], [7]])
    with session:
        got = logits(session, config, words, last)
    expected = expect(config.model, random_weights(config.model), words, labels).logits
    assert got.shape == (4, 1, config.model.vocabulary_size)
    assert distance(got[:, 0], expected[np.arange(4), last[:, 0]]) < 1e-5
