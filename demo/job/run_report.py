"""The run's page, `report.html`, which is written anew while the run trains."""

import logging
from typing import Any

from popxl_gpt.demo.job.part import Job, Part, RunState
from popxl_gpt.execution.reports.run.report import RunReport
from popxl_gpt.utils.errors import UserError, reason_of

_LOG = logging.getLogger(__name__)


class Report(Part):
    """Writes the page where there is something new, or it is old; training goes on without."""

    def __init__(self, run: RunState, job: Job):
        super().__init__(run, job)
        self._report = RunReport(run.folder.path)

    @classmethod
    def is_wanted(cls, job: Job) -> bool:
        """Whether this process writes the page."""
        return job.is_leader

    def recorded(self, values: "dict[str, Any]") -> None:
        """Write the page if it is due: there is a step, perhaps with a validation."""
        with self.run.aside():
            self._write_if_due(is_news=values["validation_loss"] is not None)

    def saved(self) -> None:
        """Write the page if it is due: there is a checkpoint."""
        self._write_if_due(is_news=True)

    def close(self) -> None:
        """Write the page with everything."""
        self._write()

    def _write_if_due(self, is_news: bool) -> None:
        if self._report.is_due(is_news):
            self._write()

    def _write(self) -> None:
        if self.run.folder.is_lost:
            return
        try:
            self._report.write()
        except (OSError, UserError, MemoryError) as error:
            if not self._report.has_failed:
                reason = str(error) if isinstance(error, UserError) else f"'{reason_of(error)}'"
                _LOG.warning(
                    "%s: not written: %s. metrics.jsonl has everything; demo/report.py makes it.",
                    self.run.folder.report,
                    reason,
                )
            self._report.has_failed = True
        else:
            self._report.has_failed = False
