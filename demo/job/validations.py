"""The validations of a run, every so many steps (`--validate_every`), and after the last one."""

import logging
import math
from collections.abc import Sequence
from typing import Any

from popxl_gpt.demo.job.batches import raise_problem, told_of
from popxl_gpt.demo.job.interruption import first
from popxl_gpt.demo.job.part import Job, Part, RunState, Step
from popxl_gpt.demo.job.validation import Validation, bytes_of_tokens
from popxl_gpt.execution.checkpoints.checkpoint_folder import validated_in
from popxl_gpt.execution.checkpoints.manifest import ManifestError
from popxl_gpt.execution.checkpoints.saved_state import Position
from popxl_gpt.execution.checkpoints.saving import add_validation
from popxl_gpt.utils.errors import DataError, reason_of
from popxl_gpt.utils.runtime import gather, release_freed_memory

_LOG = logging.getLogger(__name__)


class Validations(Part):
    """Validates after steps that are due. A run that was stopped before it had done so does it when
    it goes on.
    """

    _step: int | None = None
    """The step that was validated last."""
    _values: "dict[str, float]" = {}
    """What was measured then, by names of `metrics.jsonl`."""

    def __init__(self, run: RunState, job: Job):
        super().__init__(run, job)
        assert job.validation_data is not None
        self._interruption, saved = job.interruption, job.saved
        sizes = bytes_of_tokens(job.config, job.tokenizer)
        self._validation = Validation(job.config, job.validation_data, job.data, sizes)
        self._loaded = saved.folder if saved is not None and run.folder.holds(saved) else None
        """This run's checkpoint that it goes on from."""
        if run.is_leader and self._loaded is not None:
            self._warn_of_other_losses()

    @classmethod
    def is_wanted(cls, job: Job) -> bool:
        """Whether the run is validated."""
        return job.validation_data is not None and job.config.training.validate_every > 0

    def begin(self) -> None:
        """Validate the weights that training begins with, or those that the run goes on from, where
        that is still to be done.
        """
        run = self.run
        (last, *_) = gather(run.last_record, patiently=True)
        is_first = run.step == 0 and run.config.training.validate_first
        is_owed = last is not None and last["step"] == run.step and last["validation_loss"] is None
        if (is_first or is_owed) and self._measure():
            if run.is_leader and self._loaded is not None:
                self._add_to_loaded()
            run.each("validated", self._values)  # the line, which ends this, comes last

    def stepped(self, step: Step) -> None:
        """Validate where that is due."""
        if step.is_end:
            self._measure()

    def fields(self) -> "dict[str, Any]":
        """What was measured after this step."""
        is_validated = self._step == self.run.step
        return dict(self._values) if is_validated else {"validation_loss": None}

    def saving(self) -> "dict[str, Any]":
        """The loss after this step, where it was measured and is a number."""
        if self._step != self.run.step:
            return {}
        loss = self._values["validation_loss"]
        if not math.isfinite(loss):
            return {"validation_loss": None}
        return {"validation_loss": loss, "validation_fingerprint": self._validation.fingerprint}

    def _measure(self) -> bool:
        """Validate after this call of the session, unless it is not due, or somebody wants to stop.
        Returns whether that was done.
        """
        run = self.run
        every = run.config.training.validate_every
        if not (run.clock.is_last(run.step) or run.has_passed(every)):
            return False
        with run.aside(), run.clock.validating():
            release_freed_memory()
            measured = self._validation.measure(run.session, self._is_to_stop)
            release_freed_memory()
        if measured is None:
            return False
        self._values, self._step = measured, run.step
        return True

    def _is_to_stop(self, problem: DataError | None) -> bool:
        """Let all processes do the same before this batch of validation: whether some process got a
        signal.

        Raises:
            DataError: some process cannot read the batch.
        """
        mine = [self._interruption.signal, told_of(problem)]
        votes: Sequence[Any] = gather(mine)
        signals, problems = zip(*votes)
        if first(signals) is not None:
            return True
        if any(problems):
            raise_problem(problem, problems)
        return False

    def _add_to_loaded(self) -> None:
        """Let the checkpoint that was loaded have the loss, too, or it can never be the best."""
        assert self._loaded is not None
        position = Position(self.run.step, self.run.fingerprint, **self.saving())
        try:
            add_validation(self._loaded, position)
        except (OSError, ManifestError) as error:
            _LOG.warning(
                "%s: its validation loss could not be added: %s. It is not compared for best.",
                self._loaded,
                reason_of(error),
            )

    def _warn_of_other_losses(self) -> None:
        """Say so where checkpoints of before have losses that mean something else than those to
        come.
        """
        before = validated_in(self.run.folder.checkpoints, {})
        if before and before[0].fingerprint != self._validation.fingerprint:
            _LOG.warning(
                "%s: got validation losses measured on other data, on another number or length of "
                "samples, or by an earlier version, than from here on; expected the same, to "
                "compare them. The best checkpoint is that of those measured as the newest.",
                self.run.folder.checkpoints,
            )
