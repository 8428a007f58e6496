"""What a run leaves beside checkpoints, and prints: metrics, progress line, report, services."""

import logging
from typing import Any

from popxl_gpt.config.schema import Config
from popxl_gpt.demo.job.progress_line import ProgressLine
from popxl_gpt.demo.job.run_folder import RunFolder
from popxl_gpt.demo.job.samples_file import drop_later_samples
from popxl_gpt.demo.job.tensorboard_log import TensorboardLog
from popxl_gpt.demo.job.wandb_log import WandbLog
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.reports.metrics import MetricsFile
from popxl_gpt.execution.reports.run.report import RunReport
from popxl_gpt.utils.errors import UserError, reason_of

_LOG = logging.getLogger(__name__)


class RunRecords:
    """The records of a run that goes on after a step, in the process that leaves its files."""

    def __init__(self, config: Config, folder: RunFolder, step: int, saved: SavedRun | None):
        self.folder = folder
        self.metrics = MetricsFile(folder.metrics, step)
        drop_later_samples(folder.samples, step)
        if saved is not None and folder.holds(saved):
            self.metrics.tell_of_lost_lines(saved.position.metrics)
        self.line = ProgressLine()
        self.report = RunReport(folder.path)
        self.wandb = WandbLog(config, folder.path) if config.logging.wandb else None
        self.tensorboard = (
            TensorboardLog(folder.tensorboard, step) if config.logging.tensorboard else None
        )

    def log(self, values: dict[str, Any]) -> None:
        """Tell the services that are asked for of a step."""
        if self.wandb is not None:
            self.wandb.log(values)
        if self.tensorboard is not None:
            self.tensorboard.log(values)

    def report_if_due(self, is_news: bool) -> None:
        """Write the report, where there is something new or it is old."""
        if self.report.is_due(is_news):
            self._write_report()

    def end(self) -> None:
        """After the last step: no metrics come any more."""
        self.metrics.close()
        self.line.close()

    def close(self) -> None:
        """Complete what the services and the report have."""
        if self.wandb is not None:
            self.wandb.close()
        if self.tensorboard is not None:
            self.tensorboard.close()
        self._write_report()

    def _write_report(self) -> None:
        """Write `report.html`; training goes on without."""
        if self.folder.is_lost:
            return
        try:
            self.report.write()
        except (OSError, UserError, MemoryError) as error:
            if not self.report.has_failed:
                reason = str(error) if isinstance(error, UserError) else f"'{reason_of(error)}'"
                _LOG.warning(
                    "%s: not written: %s. metrics.jsonl has everything; demo/report.py makes it.",
                    self.folder.report,
                    reason,
                )
            self.report.has_failed = True
        else:
            self.report.has_failed = False
