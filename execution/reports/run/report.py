"""`report.html`: runs as a page, written from the files of their folders."""

import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from popxl_gpt.execution.reports.run.page import page
from popxl_gpt.execution.reports.run.run_files import REPORT, RunFiles, read_run
from popxl_gpt.utils.files.whole import write_whole

SECONDS = 60.0
"""The seconds between reports of a run that trains, at most."""
SHARE = 0.01
"""The share of a run's time that its reports may take."""


def write_report(runs: "Sequence[RunFiles]", path: Path) -> None:
    """Write the page of runs, whole or not at all; OSError where that fails."""
    made = datetime.now().astimezone().isoformat(" ", "seconds")
    write_whole(path, page(runs, made).encode("utf-8", "replace"), is_lasting=False)


class RunReport:
    """The report of a run that trains. It is due after a validation or a checkpoint, and every
    minute, but not before the time since the last one is a hundred times what that took.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._files: RunFiles | None = None
        self._written, self._took = -SECONDS, 0.0
        self.has_failed = False
        """Whether the last one was not written, which is told once."""

    def is_due(self, is_news: bool) -> bool:
        """Whether to write it now. ``is_news``: there is a validation or a checkpoint."""
        since = time.monotonic() - self._written
        return since >= (self._took / SHARE if is_news else max(SECONDS, self._took / SHARE))

    def write(self) -> None:
        """Write it.

        Raises:
            OSError, UserError: files cannot be read or written.
        """
        begin = time.monotonic()
        try:
            if self._files is None:
                self._files = read_run(self.folder)
            else:
                self._files.update()
            write_report([self._files], self.folder / REPORT)
        finally:
            self._written = time.monotonic()
            self._took = self._written - begin
