"""Runs of the training program from random weights: the gradients of one step, and steps of
training.
"""

import numpy as np
import popxl_addons as addons

from popxl_gpt.config.schedules import learning_rate
from popxl_gpt.config.schema import Config
from popxl_gpt.demo.pretraining import main
from popxl_gpt.execution.host import StepResult, run_steps
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.variables import read_gradients, read_weights, write_whole_weights
from tests.integration.gpt_oracle import (
    distance,
    hugging_face_name,
    random_batch,
    random_weights,
    small,
)

TRAINED = small(
    layers=3,
    hidden_size=48,
    heads=4,
    global_batch_size=4,
    micro_batch_size=2,
    steps=4,
    dropout=0.2,
    precision="bfloat16",
    stochastic_rounding=True,
    warmup_steps=0,
    max_norm=0.5,
)
"""A run in which everything is at work that could tell one run from another: dropout, rounding at
random, clipping.
"""


def run_job(*words: object) -> None:
    """The training job with a command line, in this process: where no fresh one is claimed, that is
    most of the time. Tests of how processes start, fail and end start some.
    """
    assert main([str(word) for word in words]) == 0


def gradients_of(config: Config, seed: int = 0) -> "tuple[float, dict[str, np.ndarray], float]":
    """Loss, whole gradients under Hugging Face's names, and gradient norm of one step of the
    program.
    """
    loss, gradients, norm = own_gradients_of(config, seed)
    return loss, {hugging_face_name(name): array for name, array in gradients.items()}, norm


def own_gradients_of(config: Config, seed: int = 0) -> "tuple[float, dict[str, np.ndarray], float]":
    """The same under our names."""
    session = pretraining(config)
    write_whole_weights(session, config, random_weights(config.model, seed).items())
    words, labels = random_batch(config)
    with session:
        (result,) = run_steps(session, config, words, labels, [0.0])
    return result.loss, read_gradients(session, config), result.gradient_norm


def worst_distance(
    got: "dict[str, np.ndarray]", expected: "dict[str, np.ndarray]"
) -> "tuple[float, str]":
    """The largest distance over Hugging Face's tensors, and whose it is."""
    assert got.keys() == expected.keys()
    return max((distance(got[name], array), name) for name, array in expected.items())


def batches(config: Config, seed: int = 5) -> "list[tuple[np.ndarray, np.ndarray]]":
    """A text that can be learned, cut at random places: words and labels, int [batch, sequence]
    each.
    """
    generator = np.random.default_rng(seed)
    size, sequence = config.training.global_batch_size, config.model.sequence_length
    text = np.cumsum(generator.integers(0, 3, 4000)) % config.model.vocabulary_size
    found = []
    for _ in range(config.training.steps):
        starts = generator.integers(0, text.size - sequence - 1, size)
        tokens = np.stack([text[start : start + sequence + 1] for start in starts])
        found.append((tokens[:, :-1], tokens[:, 1:]))
    return found


def train(config: Config) -> "tuple[list[StepResult], dict[str, np.ndarray]]":
    """Results of all steps, and the weights after them."""
    results, session = train_session(config)
    return results, read_weights(session, config)


def train_session(config: Config) -> "tuple[list[StepResult], addons.TaskSession]":
    """Results of all steps, and the session that made them."""
    session = pretraining(config)
    write_whole_weights(session, config, random_weights(config.model).items())
    data, iterations, results = batches(config), config.execution.device_iterations, []
    with session:
        for first in range(0, config.training.steps, iterations):
            words, labels = (
                np.concatenate(part) for part in zip(*data[first : first + iterations])
            )
            rates = [learning_rate(config.training, first + i) for i in range(iterations)]
            results += run_steps(session, config, words, labels, rates)
    return results, session
