"""What a run's metrics say over steps, tokens and time, in columns of numbers."""

import math
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from popxl_gpt.execution.metrics import MetricsReader

POINTS = 1000
"""Of a curve that is shown; more are thinned to the extremes of equal parts."""
SMOOTHING = 0.95
"""Share of the running mean in each step of a smooth curve."""
AXES = ("step", "tokens", "seconds")
COLUMNS = (
    "loss",
    "validation_loss",
    "validation_standard_error",
    "validation_bits_per_byte",
    "training_loss",
    "learning_rate",
    "gradient_norm",
    "step_seconds",
    "memory_bytes",
    "loss_scale",
    "skipped",
)
"""Fields of `metrics.jsonl` that are kept."""
DERIVED = ("smooth_loss", "tokens_per_second", "smooth_tokens_per_second")


class RunningMean:
    """Exponential running mean, corrected for its start; values that are not finite are left
    out.
    """

    def __init__(self) -> None:
        self._sum, self._weight = 0.0, 0.0

    def add(self, value: float) -> float:
        """Count a value. Returns the mean of all so far; nan where there is none."""
        if math.isfinite(value):
            self._sum = SMOOTHING * self._sum + (1 - SMOOTHING) * value
            self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)
        return self._sum / self._weight if self._weight else math.nan


class Curves:
    """The columns of a metrics file, which may grow: nan where a step has no value."""

    def __init__(self, path: Path):
        self._reader = MetricsReader(path)
        self._clear()

    def _clear(self) -> None:
        self._columns = {name: array("d") for name in (*AXES, *COLUMNS, *DERIVED)}
        self._loss, self._speed = RunningMean(), RunningMean()
        self._tokens = 0.0

    def __len__(self) -> int:
        return len(self._columns["step"])

    def update(self) -> None:
        """Read the lines that have come since.

        Raises:
            UserError: the file cannot be read.
        """
        is_afresh, lines = self._reader.read()
        if is_afresh:
            self._clear()
        for line in lines:
            values = {name: _number(line.get(name)) for name in (*AXES, *COLUMNS)}
            values["smooth_loss"] = self._loss.add(values["loss"])
            seconds, tokens = values["step_seconds"], values["tokens"] - self._tokens
            values["tokens_per_second"] = tokens / seconds if seconds > 0 else math.nan
            values["smooth_tokens_per_second"] = self._speed.add(values["tokens_per_second"])
            self._tokens = values["tokens"]
            for name, value in values.items():
                self._columns[name].append(value)

    def last(self, name: str) -> float:
        """The last finite value of a column; nan where there is none."""
        return next((v for v in reversed(self._columns[name]) if math.isfinite(v)), math.nan)

    def lowest(self, name: str) -> float:
        """The lowest finite value of a column; nan where there is none."""
        return min((v for v in self._columns[name] if math.isfinite(v)), default=math.nan)

    def series(self, name: str, error: str = "") -> "dict[str, list[float]]":
        """The points of a curve, thinned: lists for each axis and `y`, and for `error` another
        column's values.
        """
        y = np.array(self._columns[name])
        kept = thinned(y)
        found = {axis: _plain(np.array(self._columns[axis])[kept]) for axis in AXES}
        found["y"] = _plain(y[kept])
        if error:
            found["error"] = _plain(np.nan_to_num(np.array(self._columns[error])[kept]))
        return found


def thinned(y: np.ndarray) -> np.ndarray:
    """Indices of finite values that draw the same curve as all of them: the first, the last, and
    the extremes of equal parts.
    """
    finite = np.flatnonzero(np.isfinite(y))
    if len(finite) <= POINTS:
        return finite
    parts = np.array_split(finite, POINTS // 2 - 1)
    extremes = [part[extreme(y[part])] for part in parts for extreme in (np.argmin, np.argmax)]
    return np.unique([finite[0], *extremes, finite[-1]])


def _number(value: Any) -> float:
    try:
        return float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        return math.nan


def _plain(values: np.ndarray) -> "list[float]":
    """Seven digits are more than a page shows; 0 where there is no number."""
    return [float(f"{value:.7g}") if math.isfinite(value) else 0.0 for value in values]
