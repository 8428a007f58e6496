"""Signals: those that end a run, and the one that asks for a checkpoint."""

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import popdist

ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
"""The signals that end the process with 128 + their number: at once while nothing would be saved,
else after the present step, which is saved.
"""
KEPT = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
"""The signals that stay ignored where they were when the process was started: under nohup, and in
the background of a shell without job control.
"""
AGAIN = (signal.SIGINT, signal.SIGTERM)
"""The signals that end it at once where one of `ENDING` came before."""
SAVING = signal.SIGUSR1
"""The signal that saves after the present step; the run goes on."""
AGAIN_SECONDS = 1.0
"""The seconds after the first signal from which one of `AGAIN` ends the process at once. What comes
earlier may be one wish: a terminal that closes, its shell and a launcher each send their own.
"""
_LOG = logging.getLogger(__name__)


class Interruption:
    """Hears signals for the time of a block: in training, once it has a step that may be saved, as
    wishes, before and after that as the end.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        """The first signal that ends the run."""
        self._wants_save = False
        self._has_steps = False
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        for number in (*ENDING, SAVING):
            if number in KEPT and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # a process that ends as it was told to is told so several times, perhaps
            ends = self.signal is not None and number in ENDING
            signal.signal(number, signal.SIG_IGN if ends else handler)

    def has_steps(self, has_some: bool) -> None:
        """Note whether, from here on, a signal loses what training has done, unless it is saved."""
        self._has_steps = has_some

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == SAVING:
            self._wants_save = True
        elif self.signal is None:
            self.signal, self._since = number, time.monotonic()
            if not self._has_steps:
                _LOG.info("%s: ending at once; nothing is left to save", _name(number))
                _end(number)
            _LOG.info(
                "%s: stopping after this step; Ctrl-C or SIGTERM again stops at once", _name(number)
            )
        elif (
            number in AGAIN
            and time.monotonic() - self._since >= AGAIN_SECONDS
            and not _is_launched()  # launchers see to that themselves
        ):
            _end(number)

    def take_save(self) -> bool:
        """Whether a checkpoint was asked for since this was asked last."""
        wanted, self._wants_save = self._wants_save, False
        return wanted


def first(signals: "Sequence[int | None]") -> int | None:
    """The signal of the first process that got one."""
    return next((number for number in signals if number is not None), None)


def _is_launched() -> bool:
    """Whether a launcher watches this process: not where somebody has set its variables by hand."""
    is_ours = "POPDIST_RENDEZVOUS" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
    return is_ours or (popdist.isPopdistEnvSet() and "RANK" not in os.environ)


def _end(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
