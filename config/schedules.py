"""Learning rates as pure functions of the optimizer step, counted from 0, and batches as such of
the tokens seen.
"""

import math
from dataclasses import replace
from typing import Any

from popxl_gpt.config.schema import Config, Training


def learning_rate(training: Training, step: int) -> float:
    """The learning rate of an optimizer step.

    Warm-up rises linearly, from a first value above zero to `learning_rate` at step `warmup_steps`.
    From there the linear and cosine schedules fall to `minimum_learning_rate`, which they reach
    after `decay_steps`, or else at step `steps`, and keep. The schedule wsd stays, and falls
    linearly from step `steps - decay` on. A batch other than `base_batch_size` scales all rates.

    Args:
        step: 0 is the run's first update, `steps - 1` its last.
    Sources: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5 (cosine); Hu et al. 2024,
        "MiniCPM", arXiv:2404.06395, section 4 (wsd); Goyal et al. 2017, arXiv:1706.02677 (linear in
        the batch); Malladi et al. 2022, arXiv:2205.10287 (its square root).
    """
    scale = batch_scale(training)
    highest, lowest = scale * training.learning_rate, scale * training.minimum_learning_rate
    if step < training.warmup_steps:
        return highest * (step + 1) / (training.warmup_steps + 1)
    begin = training.warmup_steps
    length = training.steps - training.warmup_steps
    if training.schedule == "wsd":
        begin, length = training.steps - training.decay, training.decay
    elif training.decay_steps is not None:
        length = training.decay_steps
    progress = min(1.0, max(0, step - begin) / length) if length else 1.0
    if training.schedule in ("linear", "wsd"):
        return lowest + (highest - lowest) * (1.0 - progress)
    if training.schedule == "cosine":
        return lowest + (highest - lowest) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return highest


def batch_scale(training: Training) -> float:
    """The factor on learning rates of a batch other than that which they are given for."""
    if training.base_batch_size is None:
        return 1.0
    ratio = training.global_batch_size / training.base_batch_size
    return ratio if training.batch_scaling == "linear" else math.sqrt(ratio)


NO_RAMPUP = {"rampup_batch_size": None, "rampup_increment": None, "rampup_tokens": None}
"""Settings of a program whose batch does not grow."""


def stage_of(config: Config, tokens: int) -> Config:
    """The configuration of the steps that begin after so many tokens: with the batch that they
    have, and without a ramp.

    Source: Shoeybi et al. 2019, "Megatron-LM", github.com/NVIDIA/Megatron-LM, rampup_batch_size.
    """
    sizes, whole = config.training.rampup_sizes, config.training.rampup_tokens or 0
    size = config.training.global_batch_size
    if sizes and tokens < whole:
        size = sizes[tokens * len(sizes) // whole]
    changes: dict[str, Any] = {"global_batch_size": size, **NO_RAMPUP}
    return replace(config, training=replace(config.training, **changes))


def tokens_ahead(config: Config, tokens: int, steps: int) -> int:
    """Tokens of so many steps that follow after so many tokens."""
    sizes, whole = config.training.rampup_sizes, config.training.rampup_tokens or 0
    iterations, seen = config.execution.device_iterations, tokens
    while steps > 0 and sizes and seen < whole:
        stage = seen * len(sizes) // whole
        per_call = sizes[stage] * config.model.sequence_length * iterations
        end = -(-(stage + 1) * whole // len(sizes))
        calls = min(-(-(end - seen) // per_call), -(-steps // iterations))
        seen, steps = seen + calls * per_call, steps - calls * iterations
    return seen - tokens + max(0, steps) * config.tokens_per_step
