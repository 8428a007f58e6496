"""Settings: how long a run is, and its learning rate on the way."""

from dataclasses import dataclass
from typing import Annotated, Literal

from popxl_gpt.config.bounds import (
    Count,
    CountOrZero,
    Fraction,
    Largest,
    Needs,
    Positive,
    PositiveOrZero,
    SameNumbers,
)
from popxl_gpt.config.rules import rule


@dataclass(frozen=True, kw_only=True)
class Length:
    """When a run ends."""

    steps: Count = 1000
    """Optimizer steps of the whole run; the schedule ends there."""
    epochs: SameNumbers[Positive | None] = None
    """Passes over the training data, in place of steps: the run has as many steps as they take;
    none: steps.
    """
    minutes: Annotated[Positive, Largest(10**7)] | None = None
    """Minutes that the run may take, with start-up, validation and the last checkpoint: the
    schedule wsd ends with them, whatever steps says. Without --config the program chooses what is
    trained, too, but what other flags say; a run that goes on has chosen; none: as many as steps
    take.
    """


@dataclass(frozen=True, kw_only=True)
class LearningRate(Length):
    """Learning rates of steps."""

    learning_rate: Positive = 6e-4
    """Highest learning rate, reached after warm-up."""
    minimum_learning_rate: Annotated[
        PositiveOrZero,
        Needs("schedule", "--schedule linear, cosine or wsd", lambda value: value != "constant"),
    ] = 0.0
    """Learning rate that all schedules but the constant one fall to."""
    embedding_rate_multiplier: Positive = 1.0
    """Learning rate of embeddings over learning_rate, of value embeddings three times as much, of
    pairs of words a fifth; an untied head is no embedding.
    """
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """How the learning rate falls after warm-up; wsd (warm-up, stable, decay) stays at the highest
    rate and falls linearly over the last decay_steps.
    """
    decay_steps: Count | None = None
    """Steps over which the learning rate falls: with wsd the last of the run, none: a fifth of all;
    with linear and cosine those after warm-up, then it stays at minimum_learning_rate, none: all.
    """
    warmup_steps: CountOrZero = 0
    """Steps over which the learning rate rises linearly to its highest value."""
    warmup_proportion: SameNumbers[Fraction | None] = None
    """Share of steps that warm up, in place of warmup_steps; none: warmup_steps."""
    base_batch_size: Count | None = None
    """Sequences per optimizer step that learning_rate is given for: all rates of the schedule are
    scaled from it to global_batch_size; none: as they are given.
    """
    batch_scaling: Annotated[
        Literal["linear", "sqrt"],
        Needs("base_batch_size", "--base_batch_size", lambda value: value is not None),
    ] = "sqrt"
    """Factor on learning rates: global_batch_size / base_batch_size (linear, the rule for SGD), or
    its square root (sqrt, the rule for Adam).
    """

    @property
    def decay(self) -> int:
        """Last steps over which the schedule wsd falls: never those of warm-up."""
        return min(self._wanted_decay, max(0, self.steps - self.warmup_steps))

    @property
    def decay_share(self) -> float:
        """Part of a run over which it falls where the clock ends it, whatever warm-up takes."""
        return min(1.0, self._wanted_decay / self.steps)

    @property
    def _wanted_decay(self) -> int:
        return -(-self.steps // 5) if self.decay_steps is None else self.decay_steps


RULES = (
    rule(
        lambda minimum_learning_rate, learning_rate: (
            minimum_learning_rate > learning_rate
            and f"minimum_learning_rate: got {minimum_learning_rate:g}; expected at most "
            f"learning_rate = {learning_rate:g}. Lower it or raise learning_rate."
        )
    ),
    rule(
        lambda minutes, schedule: (
            minutes is not None
            and schedule != "wsd"
            and f"minutes: got {minutes:g} with schedule {schedule}; expected wsd, which ends when "
            "it is told. Give --schedule wsd, or leave --minutes out."
        )
    ),
    rule(
        lambda decay_steps, schedule: (
            decay_steps is not None
            and schedule == "constant"
            and f"decay_steps: got {decay_steps} with schedule constant; expected linear, cosine "
            "or wsd, which fall. Give --schedule, or leave --decay_steps out."
        )
    ),
    rule(
        lambda decay_steps, steps, warmup_steps, *, schedule, epochs, minutes: (
            decay_steps is not None
            and schedule == "wsd"
            and epochs is None  # the data say how many steps there are
            and minutes is None
            and decay_steps > max(0, steps - warmup_steps)
            and f"decay_steps: got {decay_steps}; expected at most steps - warmup_steps = "
            f"{steps - warmup_steps}. Lower it."
        )
    ),
)
