"""A batch that grows in stages (`--rampup_batch_size`), each a program of its own."""

import logging
import time
from collections.abc import Sequence
from typing import Any

from popxl_gpt.config.schedules import stage_of
from popxl_gpt.demo.job.part import Job, Part
from popxl_gpt.demo.job.progress_line import tell
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.checkpoint_folder import folder_name
from popxl_gpt.execution.checkpoints.saving import NotSavedError
from popxl_gpt.utils.runtime import drop_dead_sessions

_LOG = logging.getLogger(__name__)
RETRY_SECONDS = 60
"""Seconds between attempts at the checkpoint with which a batch grows."""


class GrowingBatch(Part):
    """Saves where a stage ends, and begins the next one from there. Where the disk takes no
    checkpoint, training goes on with the batch that it has.
    """

    _failed: float | None = None
    """The time at which the disk last took no checkpoint for a stage that is due."""
    _tried = 0
    """The step at which such a checkpoint was tried last."""
    _is_retried = False

    @classmethod
    def is_wanted(cls, job: Job) -> bool:
        """Whether the batch grows."""
        return job.config.training.rampup_batch_size is not None

    def vote(self) -> bool:
        """Whether the checkpoint is to be tried again, by the clock."""
        return self._failed is not None and time.monotonic() - self._failed >= RETRY_SECONDS

    def hear(self, votes: "Sequence[bool]") -> None:
        """Do as instance 0 says."""
        self._is_retried = votes[0]

    def between(self) -> bool:
        """Save at the end of a stage; when that is done, begin the next one."""
        run = self.run
        sizes = (
            c.training.global_batch_size for c in (stage_of(run.config, run.tokens), run.stage)
        )
        is_due = self._failed is None or self._is_retried or run.wants_save
        is_saved = run.saved_step == run.step
        if len(set(sizes)) == 1 or not (is_saved or (is_due and run.step > self._tried)):
            return False
        if is_saved:
            self._begin_stage()
            return True
        self._is_retried, self._tried = False, run.step
        try:
            run.each("save")
            self._failed = None
        except NotSavedError as error:
            self._failed = time.monotonic()
            if run.is_leader:
                _LOG.warning(
                    "%s Training goes on with batches of %d sequences; they grow when a checkpoint "
                    "is taken, which is tried every %d seconds.",
                    error,
                    run.stage.training.global_batch_size,
                    RETRY_SECONDS,
                )
        return True

    def fields(self) -> "dict[str, Any]":
        """The batch of the step."""
        return {"global_batch_size": self.run.stage.training.global_batch_size}

    def _begin_stage(self) -> None:
        """Go on with the next stage's batch: a program of its own takes this step's checkpoint, as
        that of a run that goes on. The state exists once.
        """
        run, old = self.run, self.run.stage.training.global_batch_size
        saved = SavedRun(run.folder.checkpoints / folder_name(run.step), run.config)
        run.entered.close()
        del run.session
        drop_dead_sessions()
        run.build(saved)
        run.entered.enter_context(run.session)
        run.each("stage_begins")
        if run.is_leader:
            new = run.stage.training.global_batch_size
            tell(f"step {run.step}: the batch grows from {old} to {new} sequences")
