"""The checkpoints of a run: when they are due, and an end that loses nothing."""

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

from popxl_gpt.demo.job.part import Job, Part, RunState
from popxl_gpt.demo.job.run_folder import for_rescue
from popxl_gpt.execution.checkpoints.saved_state import Position
from popxl_gpt.execution.checkpoints.saving import NotSavedError, Saving, begin_save, save
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.runtime import gather, release_freed_memory

_LOG = logging.getLogger(__name__)


class Checkpoints(Part):
    """Saves after steps that are due, by number or by the clock, while training goes on; and after
    the last one.
    """

    def __init__(self, run: RunState, job: Job):
        super().__init__(run, job)
        self._tokenizer, self._saved_at = job.tokenizer, time.monotonic()
        self._tried = run.step
        """The last step for which one was begun; none is due before the first step."""
        self._saving: Saving | None = None
        """A checkpoint that is written while training goes on."""

    def vote(self) -> "tuple[bool, bool, bool]":
        """Whether one is due by the clock; is written; and whether the run's folder is gone."""
        run = self.run
        is_late = run.is_leader and self._is_late()
        return is_late, self._saving is not None and self._saving.is_done, run.folder.is_lost

    def hear(self, votes: "Sequence[tuple[bool, bool, bool]]") -> None:
        """Complete the one that all have written.

        Raises:
            UserError: the run's folder is gone; this step is saved elsewhere.
        """
        are_late, are_written, are_lost = zip(*votes)
        self.run.wants_save |= any(are_late)
        if all(are_written):
            with self.run.aside():
                self.settle()
        if any(are_lost):
            self._end_elsewhere()

    def between(self) -> bool:
        """Save where that is due. Weights that may be worth little are not worth an older one."""
        run = self.run
        is_due = run.wants_save and run.step > self._tried and not run.is_doubtful
        if is_due:
            self._save()
        return is_due

    def after(self) -> None:
        """Note whether a step's checkpoint is due."""
        wanted = self.run.config.checkpoint
        self.run.wants_save |= self.run.has_passed(wanted.every)
        self.run.wants_save |= wanted.every_validation and self._is_validated

    @property
    def _is_validated(self) -> bool:
        return self.run.fields().get("validation_loss") is not None

    def _is_late(self) -> bool:
        """Whether a checkpoint is due by the clock: one of a validated step, that can be the best,
        is worth more.
        """
        minutes = self.run.config.checkpoint.every_minutes
        share = 0.5 if self._is_validated else 1.0
        return 0 < 60 * minutes * share <= time.monotonic() - self._saved_at

    def _save(self, *, is_last: bool = False) -> None:
        """Begin a checkpoint, unless this step has one; the one before, and the last one, are
        waited for. What is recorded up to it is on the disk first. Where the disk does not take it,
        older ones stay; unless it is the last, training goes on.

        Weights that only lead to skipped steps may be worth little: those before them are not
        deleted then.
        """
        run, keep_all = self.run, is_last and (self.run.is_doubtful or self.run.failure is not None)
        run.wants_save, self._tried = False, run.step
        self.settle()
        if run.saved_step == run.step:
            return
        position = self._position()
        if self._tokenizer is not None and run.is_leader:
            run.folder.keep_tokenizer(self._tokenizer)
        begun = run.config.checkpoint.init_from
        if begun is not None and run.is_leader:
            run.folder.keep_beside(Path(begun))
        self._saved_at = time.monotonic()
        release_freed_memory()  # what is read of the state takes the place of a step's tensors
        self._saving = begin_save(
            run.session, run.config, run.folder.checkpoints, position,
            keep_all=keep_all, is_behind=not is_last,
        )  # fmt: skip
        if is_last:
            self._complete()
        else:
            release_freed_memory()

    def _position(self) -> Position:
        run, clock = self.run, self.run.clock
        times = {"schedule": clock.state, "elapsed": clock.elapsed}
        more = {"tokens": run.tokens, **times, **run.saving()}
        return Position(run.step, run.fingerprint, **more)

    def settle(self) -> None:
        """Wait for the checkpoint that is being written, if one is."""
        try:
            self._complete()
        except NotSavedError as error:
            if self.run.is_leader:
                _LOG.warning("%s Training goes on, and saves again when it is due.", error)

    def _complete(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.finish()
            self.run.saved_step = saving.step

    def save(self) -> None:
        """Save this step, or raise NotSavedError; elsewhere where the folder went away."""
        with self.run.aside():
            try:
                self._save(is_last=True)
            except NotSavedError:
                lost = gather(self.run.folder.is_lost, patiently=True)
                if any(lost):
                    self._end_elsewhere()
                raise

    def end(self) -> None:
        """Complete the checkpoint that is still being written after an error, unless the run is
        abandoned. Other processes may not come here.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        if self.run.is_abandoned:
            saving.abandon()
        saving.wait()
        if isinstance(saving.problem, UserError) and self.run.is_leader:
            _LOG.warning("%s", saving.problem)

    def close(self) -> None:
        """Raise UserError for a folder that is lost after the last step was saved there."""
        run = self.run
        if run.is_leader and run.is_complete and run.folder.is_lost:
            raise UserError(f"{run.folder.loss()} Step {run.step}, the last, was there.")

    def _end_elsewhere(self) -> NoReturn:
        """Save where there is a folder, and end a run that has lost its own."""
        run = self.run
        self.settle()
        with for_rescue(run.config) if run.is_leader else nullcontext(run.folder) as other:
            saved = save(
                run.session, run.config, other.checkpoints, self._position(), keep_all=True
            )
        problem = ""
        if run.is_leader:
            where = f"Step {run.step} is saved: {saved}. Go on from there with --checkpoint.load."
            problem = f"{run.folder.loss()} {where}"
        raise UserError(gather(problem, patiently=True)[0])
