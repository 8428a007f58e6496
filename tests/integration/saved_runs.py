"""Runs whose state is saved: the same batches for the same steps, whoever trains them."""

import numpy as np

from popxl_gpt.config.schema import Config
from popxl_gpt.execution.host import run_steps
from tests.integration.gpt_oracle import small

BASE = small(steps=8, warmup_steps=0, dropout=0.1, heads=4, vocabulary_size=37)


def batch(config: Config, step: int) -> "tuple[np.ndarray, np.ndarray]":
    generator = np.random.default_rng(step)
    shape = (config.training.global_batch_size, config.model.sequence_length)
    words, labels = (generator.integers(0, config.model.vocabulary_size, shape) for _ in range(2))
    return words, labels


def train(session, config: Config, steps: range) -> "list[float]":
    count, losses = config.execution.device_iterations, []
    with session:
        for first in steps[::count]:
            words, labels = (
                np.concatenate(part)
                for part in zip(*(batch(config, first + i) for i in range(count)))
            )
            losses += [
                result.loss for result in run_steps(session, config, words, labels, [1e-2] * count)
            ]
    return losses
