"""Whether training goes wrong: steps that are skipped, losses that are no numbers, spikes."""

import logging
import math
from pathlib import Path

from popxl_gpt.config.schema import Config
from popxl_gpt.execution.host import StepResult
from popxl_gpt.execution.overflow import FLOOR, Skipped
from popxl_gpt.utils.units import counted

_LOG = logging.getLogger(__name__)


class Divergence:
    """What is wrong with a run's steps, if anything is.

    Args:
        checkpoints: the folder to go on from.
        skipped: of the program, up to the step that is judged.
        is_leader: this process warns.
    """

    diverged: str | None = None
    """Why training did not succeed, once it has come to numbers that are not finite."""
    spike: str | None = None
    """At which spike training stopped, where it is to."""

    def __init__(self, checkpoints: Path, skipped: Skipped, is_leader: bool):
        self.checkpoints, self.skipped, self.is_leader = checkpoints, skipped, is_leader
        self._tells_of_labels = is_leader
        """Of the first step that has none."""

    @property
    def failure(self) -> str | None:
        """Why training cannot go on, or shall not; None where it can."""
        return self.diverged or self.spike

    @property
    def is_doubtful(self) -> bool:
        """Whether weights may be worth less than those of a checkpoint before: they have only led
        to skipped steps.
        """
        return self.skipped.in_a_row > 0

    def judge(self, step: int, result: StepResult, config: Config, is_last: bool) -> None:
        """Look at a step's result: too many steps in a row are skipped, or the last has no finite
        loss, or its norm is a spike. Of steps in which no label counts the first is told.
        """
        if self._tells_of_labels and not result.has_labels:
            self._tells_of_labels = False
            _LOG.warning(
                "step %d: got a batch in which no label counts; expected some. Such steps are "
                "skipped, and counted as no_labels in metrics.jsonl. Look at the loss_mask of the "
                "data.",
                step,
            )
        self.diverged = self._problem(step, result, config, is_last) or self.diverged
        if result.is_spike:
            self._judge_spike(step, result, config)

    def _problem(self, step: int, result: StepResult, config: Config, is_last: bool) -> str | None:
        in_a_row, limit = self.skipped.in_a_row, config.training.max_skipped
        cure = (
            f"The weights, saved, are those after step {step - in_a_row}. Continue from an "
            f"earlier checkpoint in {self.checkpoints} with a lower learning_rate"
        )
        if config.training.fixed_scale > 1:
            cure += " or loss_scaling"
        if in_a_row >= limit:
            return (
                f"step {step}: got {counted(in_a_row, 'step')} in a row whose gradient "
                f"norm is not finite, and which were skipped; expected fewer than max_skipped = "
                f"{limit}. {cure}."
            )
        if result.is_skipped and result.loss_scale == FLOOR:
            return (
                f"step {step}: got gradients that are not finite with loss scale {FLOOR:g}, "
                f"the smallest; expected finite ones. {cure}."
            )
        if is_last and result.has_labels and not math.isfinite(result.loss):
            return f"step {step}, the last: got loss {result.loss}; expected a number. {cure}."
        return None

    def _judge_spike(self, step: int, result: StepResult, config: Config) -> None:
        """Tell of a spike, and note whether training stops at it."""
        training = config.training
        told = (
            f"step {step}: got gradient norm {result.gradient_norm:.4g}; expected at most "
            f"{result.norm_limit:.4g}, {training.spike_threshold:g} deviations above the mean of "
            f"{training.spike_window} steps. Its update is left out"
        )
        if training.on_spike == "stop":
            self.spike = self.spike or (
                f"{told}. Step {step} is saved without it: go on from there with "
                "--checkpoint.load auto, or from an earlier checkpoint in "
                f"{self.checkpoints} with a lower learning_rate."
            )
        elif self.is_leader:
            _LOG.warning("%s.", told)
