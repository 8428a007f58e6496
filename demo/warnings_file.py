"""The warnings of a run, in a file of its folder."""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Protocol

from popxl_gpt.config.plain_files import append_plain
from popxl_gpt.demo.progress_line import line_away


class HasStep(Protocol):
    """What has come to a step."""

    step: int


class WarningsFile(logging.Handler):
    """Appends what is told at warning level to a file, a JSON object a line. Shows everything as
    the handlers do whose place it takes, above a line of progress.
    """

    def __init__(self, path: Path | None, others: "Sequence[logging.Handler]"):
        super().__init__()
        self.path, self.others = path, others
        self.run: HasStep | None = None
        """The run whose steps they are told at, once there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        with line_away():
            for handler in self.others:
                if record.levelno >= handler.level:
                    handler.handle(record)
        if self.path is None or record.levelno < logging.WARNING:
            return
        values = {
            "step": None if self.run is None else self.run.step,
            "time": datetime.now().astimezone().isoformat(" ", "seconds"),
            "text": record.getMessage(),
        }
        # it is shown, and a folder that is lost or full is told in other words
        with suppress(OSError), open(append_plain(self.path), "a", encoding="ascii") as file:
            file.write(json.dumps(values) + "\n")


@contextmanager
def warnings_kept(path: Path | None) -> Iterator[WarningsFile]:
    """A block whose warnings go to a file as well; to none without a path."""
    root, before = logging.root, logging.root.handlers
    shown = before or ([logging.lastResort] if logging.lastResort is not None else [])
    handler = WarningsFile(path, list(shown))
    root.handlers = [handler]
    try:
        yield handler
    finally:
        root.handlers = before
