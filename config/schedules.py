"""Learning rates as pure functions of the optimizer step, counted from 0."""

import math

from popxl_gpt.config.schema import Training


def learning_rate(training: Training, step: int) -> float:
    """The learning rate of an optimizer step.

    Warm-up rises linearly, from a first value above zero to `learning_rate` at step `warmup_steps`.
    From there the linear and cosine schedules fall to `minimum_learning_rate`, which they reach at
    step `steps` and keep. The schedule wsd stays, and falls linearly from step `steps - decay` on.

    Args:
        step: 0 is the run's first update, `steps - 1` its last.
    Sources: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5 (cosine); Hu et al. 2024,
        "MiniCPM", arXiv:2404.06395, section 4 (wsd).
    """
    highest, lowest = training.learning_rate, training.minimum_learning_rate
    if step < training.warmup_steps:
        return highest * (step + 1) / (training.warmup_steps + 1)
    begin = training.warmup_steps
    length = training.steps - training.warmup_steps
    if training.schedule == "wsd":
        begin, length = training.steps - training.decay, training.decay
    progress = min(1.0, max(0, step - begin) / length) if length else 1.0
    if training.schedule in ("linear", "wsd"):
        return lowest + (highest - lowest) * (1.0 - progress)
    if training.schedule == "cosine":
        return lowest + (highest - lowest) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return highest
