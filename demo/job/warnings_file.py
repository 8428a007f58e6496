"""The warnings of a run, in a file of its folder."""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Protocol

from popxl_gpt.demo.job.progress_line import line_away
from popxl_gpt.utils.files.plain import append_plain


class HasStep(Protocol):
    """What has come to a step."""

    step: int


class WarningsFile(logging.Handler):
    """Appends what is told at warning level to a file, a JSON object a line. Shows everything as
    the handlers do whose place it takes, above a line of progress.
    """

    def __init__(self, others: "Sequence[logging.Handler]"):
        super().__init__()
        self.others = others
        self._path: Path | None = None
        self._early: list[str] | None = []
        """Lines from before there was a run: until then its folder may go again. None later."""
        self.run: HasStep | None = None
        """The run whose steps they are told at, once there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        with line_away():
            for handler in self.others:
                if record.levelno >= handler.level:
                    handler.handle(record)
        if record.levelno >= logging.WARNING:
            self.keep(record.getMessage())

    def begin(self, run: HasStep, path: Path | None) -> None:
        """Keep lines in a file from now on, and those that there are; None: keep none."""
        early, self._path, self._early, self.run = self._early, path, None, run
        self._append("".join(early or []))

    def keep(self, text: str) -> None:
        """Keep what is shown elsewhere."""
        values = {
            "step": None if self.run is None else self.run.step,
            "time": datetime.now().astimezone().isoformat(" ", "seconds"),
            "text": text,
        }
        line = json.dumps(values) + "\n"
        if self._early is not None:
            self._early.append(line)
        else:
            self._append(line)

    def _append(self, lines: str) -> None:
        if self._path is None or not lines:
            return
        # it is shown, and a folder that is lost or full is told in other words
        with suppress(OSError), open(append_plain(self._path), "a", encoding="ascii") as file:
            file.write(lines)


@contextmanager
def warnings_kept() -> Iterator[WarningsFile]:
    """A block whose warnings go to a file as well, once it is named."""
    root, before = logging.root, logging.root.handlers
    shown = before or ([logging.lastResort] if logging.lastResort is not None else [])
    handler = WarningsFile(list(shown))
    root.handlers = [handler]
    try:
        yield handler
    finally:
        root.handlers = before
