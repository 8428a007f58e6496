"""The native layer's logger, over Python's ``logging``."""

import logging
from typing import Any

LEVELS: dict[str, int] = {
    "TRACE": 5,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
    "OFF": logging.CRITICAL + 10,
}


class Logger:
    """One named logger with the native layer's methods and level names."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def setLevel(self, level: str) -> None:  # noqa: N802
        """Show messages from this level on: TRACE, DEBUG, INFO, WARN, ERR, CRITICAL or OFF.
        ValueError for another.
        """
        if level.upper() not in LEVELS:
            raise ValueError(
                f"Logger.setLevel: got {level!r}; expected one of {', '.join(LEVELS)}."
            )
        self._logger.setLevel(LEVELS[level.upper()])

    def debug(self, message: str, *args: Any) -> None:
        """Log at DEBUG."""
        self._logger.debug(message, *args)

    def info(self, message: str, *args: Any) -> None:
        """Log at INFO."""
        self._logger.info(message, *args)

    def warn(self, message: str, *args: Any) -> None:
        """Log at WARN."""
        self._logger.warning(message, *args)

    def error(self, message: str, *args: Any) -> None:
        """Log at ERR."""
        self._logger.error(message, *args)


def getLogger(module: str = "all") -> Logger:  # noqa: N802
    """The logger of a module of the native layer; "all" is the root of them."""
    return Logger("popart" if module == "all" else f"popart.{module}")
