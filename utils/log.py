"""Logging of the application: one line per message on stderr, from one process of a run."""

import logging
import os

from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.escaping import one_line

LEVEL_VARIABLE = "MODEL_LOG_LEVEL"
"""Environment variable that holds the level; INFO without it."""
LEVELS = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
}


class LineFormatter(logging.Formatter):
    """Messages that take no more lines than their authors gave them, and command no terminal,
    whatever they quote.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        lines = str(record.msg).count("\n") + 1
        record.message = "\n".join(map(one_line, record.message.split("\n", lines - 1)))
        return super().formatMessage(record)


def set_up_logging(is_leader: bool = True, level: str | None = None) -> None:
    """Send log messages to stderr.

    Args:
        is_leader: whether this process speaks for the run (instance 0); the others tell only
            warnings and errors.
        level: the least that is sent; None: what the environment asks for.
    Raises:
        UserError: if the environment's level is unknown.
    """
    name = (level or os.environ.get(LEVEL_VARIABLE, "INFO")).upper()
    if name not in LEVELS:
        raise UserError(
            f"{LEVEL_VARIABLE}: got {name!r}; expected one of {', '.join(LEVELS)}. Correct or "
            "unset it."
        )
    least = LEVELS[name] if is_leader else max(LEVELS[name], logging.WARNING)
    handler = logging.StreamHandler()
    handler.setFormatter(
        LineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    )
    logging.basicConfig(level=least, handlers=[handler], force=True)
    for name in ("torch", "matplotlib", "lm_eval"):  # tell of their own caches, and of each task
        logging.getLogger(name).setLevel(logging.WARNING)
