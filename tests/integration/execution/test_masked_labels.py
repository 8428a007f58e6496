"""Labels that do not count: loss and gradients are those of Hugging Face's GPT-2 with -100, over
the global batch whatever its micro-batches and replicas.
"""

import numpy as np
import pytest
import torch
from helpers.quick import cases

from popxl_gpt.config import UserError, override
from popxl_gpt.execution import host
from popxl_gpt.execution.host import run_steps
from popxl_gpt.execution.inference import evaluation, token_losses
from popxl_gpt.execution.pretraining import pretraining, training_program
from popxl_gpt.execution.variables import read_gradients, write_whole_weights
from popxl_gpt.modelling.hugging_face import hugging_face_name
from tests.integration.gpt_oracle import hugging_face, random_batch, random_weights, small
from tests.integration.runs import worst_distance

TOLERANCE = 1e-5
CASES = {
    "accumulation": small(masked_labels=True, micro_batch_size=1),
    "micro-batches together": small(masked_labels=True, widening=2, loss_scaling=512.0),
    "data parallel": small(masked_labels=True, data_parallel=2),
    "padded vocabulary": small(masked_labels=True, tensor_parallel_1=3),
    "split every way, head in pieces": small(
        masked_labels=True,
        data_parallel=2,
        tensor_parallel_1=2,
        tensor_parallel_2=2,
        heads=4,
        head_serialisation=6,
    ),
}


def masked_batch(config):
    """Samples with 9, 1, no and all labels that count."""
    words, labels = random_batch(config)
    counts = np.arange(config.model.sequence_length)
    labels[0, counts >= 9] = labels[1, counts != 5] = labels[2] = -100
    return words, labels


def run(config, words, labels):
    session = pretraining(config)
    write_whole_weights(session, config, random_weights(config.model).items())
    with session:
        (result,) = run_steps(session, config, words, labels, [0.0])
    return session, result


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(CASES, lambda case: "head" in case))
def test_loss_and_every_gradient_equal_hugging_faces_with_ignored_labels(case):
    config = CASES[case]
    words, labels = masked_batch(config)
    gpt = hugging_face(config.model, random_weights(config.model))
    logits = gpt(input_ids=torch.from_numpy(words)).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(labels).flatten(), ignore_index=-100
    )
    loss.backward()
    session, result = run(config, words, labels)
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    found = {hugging_face_name(n): a for n, a in read_gradients(session, config).items()}
    expected = {name: p.grad.numpy() for name, p in gpt.named_parameters() if p.grad is not None}
    worst = worst_distance(found, expected)
    assert worst[0] < TOLERANCE, worst


@pytest.mark.slow
def test_hugging_faces_own_loss_shifts_the_same_labels():
    """The oracle above is what `GPT2LMHeadModel` gives for `labels`, which it shifts itself."""
    config = CASES["accumulation"]
    tokens, mask = random_batch(config)[0], np.zeros((4, 12), bool)
    mask[:, 5:] = True
    gpt = hugging_face(config.model, random_weights(config.model))
    ids, labels = torch.from_numpy(tokens), torch.from_numpy(np.where(mask, tokens, -100))
    theirs = gpt(input_ids=ids, labels=labels).loss.item()
    logits = gpt(input_ids=ids).logits[:, :-1].flatten(0, 1)
    shifted = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten()).item()
    assert theirs == pytest.approx(shifted, rel=1e-6)


@pytest.mark.slow
def test_without_masked_labels_the_program_has_nothing_of_them_and_refuses_such_labels():
    config = small()
    _, io, _ = training_program(config)
    assert [name for name, _ in io.inputs.items()] == ["words", "labels", "learning_rate"]
    with pytest.raises(UserError, match=r"labels: got some that do not count.*--masked_labels"):
        run(config, *masked_batch(config))


@pytest.mark.slow
def test_a_batch_in_which_all_labels_count_has_the_loss_of_the_unmasked_program():
    config = small(layers=1)
    words, labels = random_batch(config)
    _, plain = run(config, words, labels)
    _, masked = run(override(config, masked_labels=True), words, labels)
    assert masked.loss == pytest.approx(plain.loss, rel=1e-6)
    assert masked.gradient_norm == pytest.approx(plain.gradient_norm, rel=1e-6)


@pytest.mark.slow
def test_a_batch_in_which_no_label_counts_has_no_loss_and_no_gradient():
    config = small(layers=1, masked_labels=True)
    words, labels = random_batch(config)
    _, result = run(config, words, np.full_like(labels, -100))
    assert (result.loss, result.gradient_norm) == (0.0, 0.0)


def test_evaluation_gives_the_losses_of_labels_that_count_beside_others():
    config = small(layers=1, tensor_parallel_1=3)
    words, labels = random_batch(config)
    masked = masked_batch(config)[1]
    session = evaluation(config)
    write_whole_weights(session, config, random_weights(config.model).items())
    with session:
        whole, part = (token_losses(session, config, words, own) for own in (labels, masked))
    np.testing.assert_array_equal(part[masked >= 0], whole[masked >= 0])


@pytest.mark.parametrize(
    ("told", "count"),
    [([[0, [3]], [1, [5]]], 8), ([[0, [3]], [0, [3]], [1, [4]], [1, [4]]], 7), ([[0, [0]]], 1)],
    ids=["a copy each", "parts of a copy", "none"],
)
def test_labels_of_all_processes_count_and_those_of_parts_of_a_copy_once(monkeypatch, told, count):
    asked = []
    monkeypatch.setattr(host, "gather", lambda mine, number: asked.append(mine) or told)
    config = small(masked_labels=True, data_parallel=2)
    labels = np.full((4, 12), -100)
    labels[0, :3] = 7
    weights = host.label_weights(labels, 1, config)
    assert asked == [[0, [3]]]
    assert weights.tolist() == [config.gradient_accumulation * 2 / count]
