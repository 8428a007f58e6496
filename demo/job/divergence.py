"""Whether training goes wrong: steps that are skipped, losses that are no numbers, spikes."""

import logging
import math
from typing import Any

from popxl_gpt.demo.job.part import Call, Job, Part, RunState, Step
from popxl_gpt.execution.host import StepResult
from popxl_gpt.execution.overflow import FLOOR, name_the_first
from popxl_gpt.utils.errors import DivergedError, SpikeError
from popxl_gpt.utils.units import counted

_LOG = logging.getLogger(__name__)


class Divergence(Part):
    """Judges each step, and ends the run where training cannot go on, or shall not."""

    _last: Call | None = None

    def __init__(self, run: RunState, job: Job):
        super().__init__(run, job)
        self._checkpoints = run.folder.checkpoints
        self._tells_of_labels = run.is_leader
        """Whether the first step that has none is still to come."""

    def called(self, call: Call) -> None:
        """Keep the call: its steps may have to run again."""
        self._last = call

    def stepped(self, step: Step) -> None:
        """Look at a step's result: too many steps in a row are skipped, or the last has no finite
        loss, or its norm is a spike. Of steps in which no label counts the first is told.
        """
        run, result = self.run, step.result
        if self._tells_of_labels and not result.has_labels:
            self._tells_of_labels = False
            _LOG.warning(
                "step %d: got a batch in which no label counts; expected some. Such steps are "
                "skipped, and counted as no_labels in metrics.jsonl. Look at the loss_mask of the "
                "data.",
                run.step,
            )
        problem = self._problem(run.step, result, step.is_end and run.clock.is_last(run.step))
        if problem is not None:
            run.failure = DivergedError(problem)
        if result.is_spike:
            self._judge_spike(run.step, result)

    def fields(self) -> "dict[str, Any]":
        """Steps so far that were left out, by reason."""
        skipped, training = self.run.skipped, self.run.config.training
        return {
            "skipped": skipped.total,
            **({"no_labels": skipped.no_labels} if training.masked_labels else {}),
            **({"spikes": skipped.spikes} if training.looks_for_spikes else {}),
        }

    def save(self) -> None:
        """Say where the last call first met a number that is not finite, where that can be found:
        weights have changed since its first step unless all are skipped.
        """
        run, last = self.run, self._last
        if not isinstance(run.failure, DivergedError) or last is None:
            return
        if all(result.is_skipped for result in last.results):
            place = name_the_first(run.session, run.stage, last.words, last.labels, last.results)
            if place is not None:
                told = f"{run.failure} The first number that was not finite: {place}."
                run.failure = DivergedError(told)

    def _problem(self, step: int, result: StepResult, is_last: bool) -> str | None:
        training = self.run.config.training
        in_a_row, limit = self.run.skipped.in_a_row, training.max_skipped
        cure = (
            f"The weights, saved, are those after step {step - in_a_row}. Continue from an "
            f"earlier checkpoint in {self._checkpoints} with a lower learning_rate"
        )
        if training.fixed_scale > 1:
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

    def _judge_spike(self, step: int, result: StepResult) -> None:
        """Warn of a spike, or end the run at it."""
        training = self.run.config.training
        told = (
            f"step {step}: got gradient norm {result.gradient_norm:.4g}; expected at most "
            f"{result.norm_limit:.4g}, {training.spike_threshold:g} deviations above the mean of "
            f"{training.spike_window} steps. Its update is left out"
        )
        if training.on_spike == "stop":
            self.run.failure = self.run.failure or SpikeError(
                f"{told}. Step {step} is saved without it: go on from there with "
                "--checkpoint.load auto, or from an earlier checkpoint in "
                f"{self._checkpoints} with a lower learning_rate."
            )
        elif self.run.is_leader:
            _LOG.warning("%s.", told)
