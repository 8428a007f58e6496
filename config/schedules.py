"""Learning rates as pure functions of the optimizer step, counted from 0."""

import math

from popxl_gpt.config.schema import Training


def learning_rate(training: Training, step: int) -> float:
    """The learning rate of an optimizer step.

    Warm-up rises linearly, from a first value above zero to `learning_rate` at step `warmup_steps`.
    From there the linear and cosine schedules fall to `minimum_learning_rate`, which they reach at
    step `steps` and keep.

    Args:
        step: 0 is the run's first update, `steps - 1` its last.
    """
    highest, lowest = training.learning_rate, training.minimum_learning_rate
    if step < training.warmup_steps:
        return highest * (step + 1) / (training.warmup_steps + 1)
    length = training.steps - training.warmup_steps
    progress = min(1.0, (step - training.warmup_steps) / length) if length else 1.0
    if training.schedule == "linear":
        return lowest + (highest - lowest) * (1.0 - progress)
    if training.schedule == "cosine":
        return lowest + (highest - lowest) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return highest
