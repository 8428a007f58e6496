"""A head with several losses: each is reported, and their sum by weights is trained, as PyTorch's
autograd has it.
"""

import numpy as np
import pytest
import torch
from helpers.quick import cases

from popxl_gpt.config.presets import preset
from popxl_gpt.execution.host import run_steps
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.reports.metrics import read_metrics
from popxl_gpt.execution.variables import read_gradients, write_whole_weights
from tests.integration.gpt_oracle import (
    hugging_face,
    hugging_face_name,
    random_batch,
    random_weights,
    small,
)
from tests.integration.runs import run_job, worst_distance

TOLERANCE = 1e-5
WEIGHT = 0.3
SPLIT = {"tensor_parallel_1": 2, "tensor_parallel_2": 2, "heads": 4}
CASES = {
    "one replica": small(z_loss=WEIGHT, loss_scaling=512.0),
    "data parallel": small(z_loss=WEIGHT, data_parallel=2, masked_labels=True, widening=2),
    "split every way, head in pieces": small(
        z_loss=WEIGHT, **SPLIT, masked_labels=True, head_serialisation=6
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", cases(CASES, lambda case: "head" in case))
def test_losses_and_gradients_of_their_sum_equal_autograds(case):
    config = CASES[case]
    words, labels = random_batch(config)
    if config.training.masked_labels:
        labels[0, 3:] = labels[2] = -100
    gpt = hugging_face(config.model, random_weights(config.model))
    logits = gpt(input_ids=torch.from_numpy(words)).logits.flatten(0, 1)
    flat = torch.from_numpy(labels).flatten()
    cross_entropy = torch.nn.functional.cross_entropy(logits, flat, ignore_index=-100)
    z_loss = logits.logsumexp(dim=1)[flat >= 0].square().mean()
    total = cross_entropy + WEIGHT * z_loss
    total.backward()

    session = pretraining(config)
    write_whole_weights(session, config, random_weights(config.model).items())
    with session:
        (result,) = run_steps(session, config, words, labels, [0.0])
    assert result.loss == pytest.approx(total.item(), rel=TOLERANCE)
    expected_losses = {"cross_entropy": cross_entropy.item(), "z_loss": z_loss.item()}
    assert result.losses == pytest.approx(expected_losses, rel=TOLERANCE)
    found = {hugging_face_name(n): a for n, a in read_gradients(session, config).items()}
    expected = {name: p.grad.numpy() for name, p in gpt.named_parameters() if p.grad is not None}
    worst = worst_distance(found, expected)
    assert worst[0] < TOLERANCE, worst
    norm = np.sqrt(sum(np.sum(np.square(gradient)) for gradient in expected.values()))
    assert result.gradient_norm == pytest.approx(norm, rel=TOLERANCE)


@pytest.mark.multi
def test_each_loss_of_each_step_is_recorded(tmp_path):
    flags = "--config tiny --name run --layers 1 --data_parallel 1 --tensor_parallel_1 1"
    more = "--tensor_parallel_2 1 --steps 4 --device_iterations 2 --validate_every 0"
    run_job(*flags.split(), *more.split(), "--z_loss", 1e-3, "--run_folder", tmp_path)
    lines = read_metrics(tmp_path / "run/metrics.jsonl")
    assert len(lines) == 4
    for line in lines:
        total = line["cross_entropy"] + 1e-3 * line["z_loss"]
        assert line["loss"] == pytest.approx(total, rel=1e-6)
        config = preset("tiny")
        assert line["labels"] == config.training.global_batch_size * config.model.sequence_length
    report = (tmp_path / "run/report.html").read_text()
    assert "cross entropy" in report and "Labels that count" in report
