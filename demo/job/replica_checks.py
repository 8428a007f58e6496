"""Replicas that must hold the same bytes: they are compared every so many steps
(`--check_replicas`), and before each checkpoint.
"""

from popxl_gpt.demo.job.part import Job, Part
from popxl_gpt.execution.replicas import check_replicas


class ReplicaChecks(Part):
    """Raises CorruptedError where they differ: nothing of the step is saved then."""

    _step: int | None = None
    """The step that was checked last."""

    @classmethod
    def is_wanted(cls, job: Job) -> bool:
        """Whether replicas are compared."""
        return job.config.execution.check_replicas > 0

    def after(self) -> None:
        """Compare them where that is due."""
        if self.run.has_passed(self.run.config.execution.check_replicas):
            with self.run.aside():
                self._check()

    def before_save(self) -> None:
        """Compare them, unless that was done after this step."""
        if self._step != self.run.step:
            self._check()

    def _check(self) -> None:
        check_replicas(self.run.session, self.run.step)
        self._step = self.run.step
