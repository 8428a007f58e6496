"""What a run's metrics say over steps, tokens and time, in columns of numbers; of a long run, in as
much memory as of a short one.
"""

import math
from pathlib import Path

import numpy as np

from popxl_gpt.execution.reports.metrics import MetricsReader, number_of
from popxl_gpt.execution.reports.running_mean import RunningMean

POINTS = 1000
"""The points of a curve that is shown; more are thinned to the extremes of equal parts."""
AXES = ("step", "tokens", "seconds")
COLUMNS = (
    "loss",
    "cross_entropy",
    "z_loss",
    "validation_loss",
    "validation_standard_error",
    "validation_bits_per_byte",
    "training_loss",
    "learning_rate",
    "global_batch_size",
    "gradient_norm",
    "step_seconds",
    "data_seconds",
    "forward_seconds",
    "backward_seconds",
    "update_seconds",
    "rows_seconds",
    "others_seconds",
    "mfu",
    "memory_bytes",
    "loss_scale",
    "skipped",
    "no_labels",
    "labels",
)
"""Fields of `metrics.jsonl` that are kept."""
DERIVED = (
    "smooth_loss",
    "tokens_per_second",
    "smooth_tokens_per_second",
    "smooth_mfu",
    "data_share",
    "waited",
)
"""Columns that follow from the others: `data_share` is the share of a step's time that it waited
for data, and `waited` the seconds that all steps so far did.
"""
NAMES = (*AXES, *COLUMNS, *DERIVED)
STEPS_HELD = 32 * POINTS
"""Steps of which the numbers are held. When there are more, those stay that are a column's extremes
in one of equal parts of the run, at most half of them.
"""
PARTS = STEPS_HELD // (4 * len((*COLUMNS, *DERIVED)))


class Curves:
    """The columns of a metrics file, which may grow: nan where a step has no value."""

    def __init__(self, path: Path):
        self._reader = MetricsReader(path)
        self._held = np.full((len(NAMES), STEPS_HELD), math.nan)
        self._clear()

    def _clear(self) -> None:
        self._count = 0
        self._loss, self._speed, self._mfu = RunningMean(), RunningMean(), RunningMean()
        self._step, self._tokens, self._waited = 0.0, 0.0, 0.0

    def __len__(self) -> int:
        return self._count

    def _column(self, name: str) -> np.ndarray:
        return self._held[NAMES.index(name), : self._count]

    def update(self) -> None:
        """Read the lines that have come since.

        Raises:
            UserError: the file cannot be read.
        """
        is_afresh, lines = self._reader.read()
        if is_afresh:
            self._clear()
        for line in lines:
            values = {name: number_of(line.get(name)) for name in (*AXES, *COLUMNS)}
            values["smooth_loss"] = self._loss.add(values["loss"])
            # lines before may lie in another run's file, or be lost
            steps, tokens = values["step"] - self._step, values["tokens"] - self._tokens
            seconds = steps * values["step_seconds"]
            values["tokens_per_second"] = tokens / seconds if seconds > 0 else math.nan
            values["smooth_tokens_per_second"] = self._speed.add(values["tokens_per_second"])
            values["smooth_mfu"] = self._mfu.add(values["mfu"])
            waited = values["data_seconds"]
            values["data_share"] = steps * waited / seconds if seconds > 0 else math.nan
            told = steps if self._count else 1.0  # steps before the first line are another run's
            self._waited += max(0.0, told * waited) if math.isfinite(waited) else 0.0
            values["waited"] = self._waited if math.isfinite(waited) else math.nan
            self._step, self._tokens = values["step"], values["tokens"]
            if self._count == STEPS_HELD:
                self._thin()
            self._held[:, self._count] = [values[name] for name in NAMES]
            self._count += 1

    def _thin(self) -> None:
        """Hold half of the steps: the first and the last one, and each column's last value, and
        its extremes in equal parts of the run.
        """
        steps, kept = self._column("step"), {0, self._count - 1}
        kept |= {last for name in NAMES if (last := self._last(name)) is not None}
        bounds = np.linspace(steps[0], steps[-1], PARTS + 1)[1:-1]
        for part in np.split(np.arange(self._count), np.searchsorted(steps, bounds)):
            for name in (*COLUMNS, *DERIVED):
                finite = part[np.isfinite(self._column(name)[part])]
                if len(finite):
                    y = self._column(name)[finite]
                    kept |= {int(finite[np.argmin(y)]), int(finite[np.argmax(y)])}
        self._held[:, : len(kept)] = self._held[:, sorted(kept)]
        self._count = len(kept)

    def last(self, name: str) -> float:
        """The last finite value of a column; nan where there is none."""
        place = self._last(name)
        return math.nan if place is None else float(self._column(name)[place])

    def _last(self, name: str) -> int | None:
        finite = np.flatnonzero(np.isfinite(self._column(name)))
        return int(finite[-1]) if len(finite) else None

    def lowest(self, name: str) -> float:
        """The lowest finite value of a column; nan where there is none."""
        column = self._column(name)
        return float(min(column[np.isfinite(column)], default=math.nan))

    def series(self, name: str, error: str = "") -> "dict[str, list[float]]":
        """The points of a curve, thinned: lists for each axis and `y`, and for `error` another
        column's values.
        """
        y = self._column(name)
        kept = thinned(y)
        found = {axis: _plain(self._column(axis)[kept]) for axis in AXES}
        found["y"] = _plain(y[kept])
        if error:
            found["error"] = _plain(np.nan_to_num(self._column(error)[kept]))
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


def _plain(values: np.ndarray) -> "list[float]":
    """Seven digits are more than a page shows; 0 where there is no number."""
    return [float(f"{value:.7g}") if math.isfinite(value) else 0.0 for value in values]
