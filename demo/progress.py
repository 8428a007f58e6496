"""The progress line, and what is measured for it."""

import time
from collections import deque
from collections.abc import Mapping

from config import Config
from execution.model_size import flops_per_step
from utils.units import duration, si

WINDOW = 20
"""Session runs over which speed is averaged."""


class Progress:
    """Speed and time left, from the times of session runs; validation and saving are not counted as
    speed.
    """

    def __init__(self, config: Config, first_step: int):
        self.config = config
        self.flops = flops_per_step(config)
        self._times: "deque[tuple[int, float]]" = deque(maxlen=WINDOW)
        self._begin = time.perf_counter()
        self._first_step = first_step

    def ran(self, steps: int, seconds: float) -> None:
        """Count a session run."""
        self._times.append((steps, seconds))

    @property
    def last_seconds(self) -> float:
        """Of a step of the last session run."""
        steps, seconds = self._times[-1]
        return round(seconds / steps, 6)

    @property
    def seconds_per_step(self) -> float:
        """Mean over the last runs; the very first, which may compile, drops out as soon as there
        are others.
        """
        times = list(self._times)
        if len(times) > 1 and len(times) < WINDOW:
            times = times[1:]
        return sum(seconds for _, seconds in times) / sum(steps for steps, _ in times)

    @property
    def tokens_per_second(self) -> float:
        """Training tokens per second over all replicas."""
        return self.config.tokens_per_step / self.seconds_per_step

    @property
    def flops_per_second(self) -> float:
        """The model's floating-point operations per second over all replicas."""
        return self.flops / self.seconds_per_step

    def seconds_left(self, step: int) -> float:
        """Expected time until the last step, at the pace of this run with everything in it."""
        if step <= self._first_step:
            return 0.0
        pace = (time.perf_counter() - self._begin) / (step - self._first_step)
        return pace * (self.config.training.steps - step)

    def line(
        self,
        step: int,
        tokens: int,
        loss: float,
        validation: "Mapping[str, float]",
        learning_rate: float,
        gradient_norm: float,
        skipped: int = 0,
    ) -> str:
        """One line about a step. ``tokens``: seen so far. ``validation``: what the last one found,
        by its names in `metrics.jsonl`. ``skipped``: steps so far that were, which is told where
        there are any.
        """
        steps = self.config.training.steps
        parts = [
            f"step {step:>{len(str(steps))}}/{steps}",
            f"loss {loss:.4f}",
            validation_text(validation),
            f"lr {learning_rate:.2e}",
            f"norm {gradient_norm:.3f}",
            *([f"{skipped} skipped"] if skipped else []),
            si(tokens, "tokens"),
            si(self.tokens_per_second, "tokens/s"),
            si(self.flops_per_second, "FLOP/s"),
            f"{duration(self.seconds_left(step))} left",
        ]
        return "  ".join(parts)


def validation_text(found: "Mapping[str, float]") -> str:
    """What a validation found, by its names in `metrics.jsonl`, in a few words."""
    if not found:
        return "validation -"
    text = f"validation {found['validation_loss']:.4f}"
    if "validation_standard_error" in found:
        text += f" ±{found['validation_standard_error']:.4f}"
    if "training_loss" in found:
        text += f"  on training data {found['training_loss']:.4f}"
    if "validation_bits_per_byte" in found:
        text += f"  {found['validation_bits_per_byte']:.4f} bits/byte"
    return text
