"""What a case of `own.py` is made of: seconds, and how two of them compare."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Arguments

Clocks = np.ndarray
"""Seconds of the wall and of the processors, float64 [2]."""


def now() -> Clocks:
    """The clocks of this process."""
    return np.array([time.perf_counter(), time.process_time()])


def clocked(work: Callable[..., Any], *arguments: Any) -> Clocks:
    """The seconds that a call takes."""
    begin = now()
    work(*arguments)
    return now() - begin


@dataclass(frozen=True)
class Comparison:
    """A figure of what is timed, and of what stands beside it."""

    name: str
    of: Callable[[Clocks, Clocks], Clocks]


MORE = Comparison("% more", lambda timed, beside: 100 * (timed / beside - 1))
RATIO = Comparison("of it", lambda timed, beside: timed / beside)
SPEED = Comparison("its speed", lambda timed, beside: beside / timed)
BEYOND = Comparison("beyond it", lambda timed, beside: timed - beside)

Unit = tuple[str, float]
"""A name, and how many of it a second is."""
SECONDS: Unit = ("s", 1.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row: one thing that is timed, and what it is compared with, in turn."""

    name: str
    """Its group, a comma, and what tells it from the others of the group."""
    ready: Callable[[Arguments, Path], Any]
    """The set-up, outside all timing: flags and an empty folder, to what is worked on."""
    timed: Callable[[Any], Clocks | float]
    """Seconds, on what is ready."""
    beside: Callable[[Any], Clocks | float] | None = None
    """The seconds that it is compared with."""
    unit: Unit = SECONDS
    compared: Comparison | None = None
    bar: tuple[float, float] = (-np.inf, np.inf)
    """What the comparison may be, at least and at most; where there is none, what is timed."""
    clock: int = 1
    """The clock of the bar: 0 the wall's, 1 the processors', which other work distorts least."""
    rounds: int = 3
    warmup: int = 0
    kept: Callable[..., Any] = field(default=np.median)
    """The figure that is kept of all rounds."""
