"""Documents packed into one sequence: loss and gradients are those of Hugging Face's GPT-2 run on
each document by itself.
"""

import json

import numpy as np
import pytest
import torch
from helpers.quick import cases

from popxl_gpt.config.presets import override
from popxl_gpt.data.conversations import conversation_source
from popxl_gpt.data.preparation import Settings, prepare
from popxl_gpt.demo.job.training_data import open_data
from popxl_gpt.execution.host import document_positions, run_steps
from popxl_gpt.execution.inference.inference import evaluation, generation, logits, token_losses
from popxl_gpt.execution.pretraining import pretraining, training_program
from popxl_gpt.execution.variables import read_gradients, write_whole_weights
from popxl_gpt.utils.errors import UserError
from tests.integration.gpt_oracle import (
    distance,
    hugging_face,
    hugging_face_name,
    random_batch,
    random_weights,
    small,
)
from tests.integration.runs import worst_distance

TOLERANCE = 1e-5
END = 3
ON = {"document_attention": True, "end_of_text": END}
CASES = {
    "plain": small(**ON),
    "no recomputation": small(**ON, recomputation=False),
    "serialised attention": small(**ON, attention_serialisation=4, recomputation=False),
    "micro-batches together": small(**ON, widening=2),
    "masked labels": small(**ON, masked_labels=True),
    "split every way": small(
        **ON, data_parallel=2, tensor_parallel_1=2, tensor_parallel_2=2, heads=4
    ),
    "split heads, whole": small(**ON, tensor_parallel_1=3, replicated_tensor_sharding=False),
}


def batch(config):
    """Samples of three documents, one, two of one token each at the ends, and no end at all."""
    words, labels = random_batch(config)
    words[words == END] = END + 1
    words[0, [3, 7]] = words[1, 11] = words[2, [0, 10]] = END
    if config.training.masked_labels:
        labels[:, 2:6] = -100
    return words, labels


def per_document(gpt, words, labels):
    """Losses of all labels, [samples, sequence]; those of labels below zero are zero."""
    rows = []
    for row, own in zip(words, labels):
        cuts = np.flatnonzero(row == END) + 1
        for piece, wanted in zip(np.split(row, cuts), np.split(own, cuts)):
            if piece.size:
                found = gpt(input_ids=torch.from_numpy(piece[None])).logits[0]
                rows.append(
                    torch.nn.functional.cross_entropy(
                        found, torch.from_numpy(wanted), ignore_index=-100, reduction="none"
                    )
                )
    return torch.cat(rows).reshape(words.shape)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "case", cases(CASES, lambda case: case in ("serialised attention", "split every way"))
)
def test_loss_and_every_gradient_equal_hugging_faces_document_by_document(case):
    config = CASES[case]
    words, labels = batch(config)
    gpt = hugging_face(config.model, random_weights(config.model))
    loss = per_document(gpt, words, labels).sum() / int((labels >= 0).sum())
    loss.backward()
    session = pretraining(config)
    write_whole_weights(session, config, random_weights(config.model).items())
    with session:
        (result,) = run_steps(session, config, words, labels, [0.0])
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    found = {hugging_face_name(n): a for n, a in read_gradients(session, config).items()}
    expected = {name: p.grad.numpy() for name, p in gpt.named_parameters() if p.grad is not None}
    worst = worst_distance(found, expected)
    assert worst[0] < TOLERANCE, worst


@pytest.mark.slow
def test_evaluation_and_logits_are_those_of_each_document():
    config = small(**ON, layers=1, tensor_parallel_1=3)
    words, labels = batch(config)
    weights = random_weights(config.model)
    gpt = hugging_face(config.model, weights)
    session = evaluation(config)
    write_whole_weights(session, config, weights.items())
    with session:
        losses = token_losses(session, config, words, labels)
    with torch.no_grad():
        assert distance(losses, per_document(gpt, words, labels).numpy()) < TOLERANCE
        last = gpt(input_ids=torch.from_numpy(words[:1, 8:])).logits[0, -1].numpy()
    session = generation(config, rows=1)
    write_whole_weights(session, config, weights.items())
    with session:
        found = logits(session, config, words, np.full((4, 1), 11))
    assert distance(found[0, 0], last) < TOLERANCE


@pytest.mark.slow
def test_the_losses_of_steps_do_not_depend_on_the_layout():
    """The loss of a second step follows from the update of all layers."""
    losses = []
    for layout in ({}, {"tensor_parallel_1": 2, "tensor_parallel_2": 2, "widening": 2}):
        config = small(**ON, heads=4, device_iterations=2, steps=2, **layout)
        words, labels = (np.concatenate([part, part]) for part in batch(config))
        session = pretraining(config)
        write_whole_weights(session, config, random_weights(config.model).items())
        with session:
            losses.append([r.loss for r in run_steps(session, config, words, labels, [0.01] * 2)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][1] < losses[0][0]


def test_positions_count_from_the_token_after_each_end():
    words = np.array([[5, 5, 0, 5, 0, 0, 5], [0, 5, 5, 5, 5, 5, 0], [5] * 7])
    expected = [[0, 1, 2, 0, 1, 0, 0], [0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6]]
    assert document_positions(words, 0).tolist() == expected


@pytest.mark.slow
def test_a_program_without_it_has_nothing_of_it():
    _, io, _ = training_program(small())
    assert set(io.buffers) == {"x", "dx"}
    assert [name for name, _ in io.inputs.items()] == ["words", "labels", "learning_rate"]
    on, off = (
        training_program(override(small(), document_attention=is_on)) for is_on in (True, False)
    )
    assert len(off[1].inputs.items()) + 1 == len(on[1].inputs.items())


def test_data_that_the_settings_do_not_fit_are_refused(tmp_path):
    lines = [json.dumps({"prompt": f"{n} ", "answer": "yes"}) + "\n" for n in range(20)]
    (tmp_path / "lines.jsonl").write_text("".join(lines))
    source = conversation_source([str(tmp_path / "lines.jsonl")])
    prepared = Settings(sequence_length=12, characters=True, validation=0.0)
    prepare(source, tmp_path / "out", prepared, report=lambda line: None)
    config = small(input_files=(str(tmp_path / "out"),))
    with pytest.raises(UserError, match="with prompts.* Give --masked_labels"):
        open_data(config)
    config = override(config, masked_labels=True)
    assert len(open_data(config)[0]) > 0
    with pytest.raises(UserError, match="--end_of_text: got 3; expected 0, with which documents"):
        open_data(override(config, **ON))
