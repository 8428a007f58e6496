"""Learning rates as pure functions of the optimizer step, counted from 0."""

import math

from config.schema import Training


def learning_rate(training: Training, step: int) -> float:
    """The learning rate of an optimizer step.

    Warm-up rises linearly, from a first value above zero to `learning_rate` at step `warmup_steps`; then the schedule
    runs, and the last step, `steps - 1`, has `minimum_learning_rate` (linear, cosine) or `learning_rate` (constant).

    Args:
        step: 0 is the run's first update. From `steps` on, the last step's rate stays.
    """
    highest, lowest = training.learning_rate, training.minimum_learning_rate
    if step < training.warmup_steps:
        return highest * (step + 1) / (training.warmup_steps + 1)
    length = training.steps - 1 - training.warmup_steps
    progress = min(1.0, (step - training.warmup_steps) / length) if length > 0 else 0.0
    if training.schedule == "linear":
        return highest + (lowest - highest) * progress
    if training.schedule == "cosine":
        return lowest + (highest - lowest) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return highest
