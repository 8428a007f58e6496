"""The warnings of a run, in a file of its folder."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Optional, Protocol


class HasStep(Protocol):
    """What has come to a step."""

    step: int


class WarningsFile(logging.Handler):
    """Appends what is told at warning level to a file, a JSON object a line, and shows it as it is
    shown without this handler.
    """

    def __init__(self, path: Optional[Path]):
        super().__init__(logging.WARNING)
        self.path = path
        self.run: Optional[HasStep] = None
        """The run whose steps they are told at, once there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        if logging.lastResort is not None and logging.root.handlers == [self]:
            logging.lastResort.handle(record)
        if self.path is None:
            return
        values = {
            "step": None if self.run is None else self.run.step,
            "time": datetime.now().astimezone().isoformat(" ", "seconds"),
            "text": record.getMessage(),
        }
        # it is shown, and a folder that is lost or full is told in other words
        with suppress(OSError), open(self.path, "a", encoding="utf-8", errors="replace") as file:
            file.write(json.dumps(values) + "\n")


@contextmanager
def warnings_kept(path: Optional[Path]) -> Iterator[WarningsFile]:
    """A block whose warnings go to a file as well; to none without a path."""
    handler = WarningsFile(path)
    logging.root.addHandler(handler)
    try:
        yield handler
    finally:
        logging.root.removeHandler(handler)
