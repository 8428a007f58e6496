"""The progress line, and what is measured for it."""

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from popxl_gpt.config.schedules import stage_of, tokens_ahead
from popxl_gpt.config.schema import Config
from popxl_gpt.demo.job.progress_line import Piece
from popxl_gpt.execution.planning.model_size import flops_per_token
from popxl_gpt.execution.reports.running_mean import RunningMean
from popxl_gpt.utils.units import duration, si

WINDOW = 20
"""Session runs over which speed is averaged."""
SHOWN = 0.05
"""Share of a step that waits for data from which on the line says so."""
LIMITING, FEWEST, NOTICED = 0.1, 5, 1.0
"""Share of so many session runs, at least, from which on data are what limits the speed, once the
run has waited for so many seconds."""


class Progress:
    """Speed and time left, from the times of session runs by the clock, see `StepClock`."""

    def __init__(
        self,
        config: Config,
        first_step: int,
        limit_seconds: float | None = None,
        first_tokens: int = 0,
    ):
        """``limit_seconds``: of a step at the machine's physical limit, where that is known.
        ``first_tokens``: seen before.
        """
        self.config = config
        self.limit_seconds = limit_seconds
        self.ceiling: float | None = None
        """FLOP/s that the machine multiplies at most, once that is known."""
        self.loss = RunningMean()
        self._flops = flops_per_token(config.model)
        self._times: deque[tuple[int, float, float]] = deque(maxlen=WINDOW)
        """The newest session runs: steps, seconds, and those of them that waited for data."""
        self._runs, self._waited, self._is_limit_told = 0, 0.0, False
        self._begin = time.perf_counter()
        self._first_step, self._first_tokens = first_step, first_tokens
        self._stage = stage_of(config, first_tokens)
        self._validation: Mapping[str, Any] = {}
        """The record of the last step that was validated."""

    def begin_stage(self, stage: Config) -> None:
        """Forget times of steps with another batch."""
        self._stage = stage
        self._times.clear()
        self._runs = 0

    def ran(self, steps: int, seconds: float, waited: float = 0.0) -> None:
        """Count a session run. ``waited``: for data, of the seconds. The very first, which may
        compile, counts until there is another.
        """
        if self._runs == 1:
            self._times.clear()
        self._times.append((steps, seconds, waited))
        self._runs += 1
        self._waited += waited

    def fields(self) -> "dict[str, float]":
        """What the record of a step has of the last session run: the seconds of a step, those that
        it waited for data, and its model FLOPs utilisation, the model's FLOP/s over the most that
        the machine multiplies, where that is known.
        """
        steps, seconds, waited = self._times[-1]
        times = {
            "step_seconds": round(seconds / steps, 6),
            "data_seconds": round(waited / steps, 6),
        }
        mfu = self._mfu(steps, seconds)
        return times if mfu is None else {**times, "mfu": round(mfu, 4)}

    @property
    def seconds_per_step(self) -> float:
        """Mean over the last runs."""
        return sum(seconds for _, seconds, _ in self._times) / self._steps

    @property
    def waited_per_step(self) -> float:
        """Mean of seconds waited for data over the last runs."""
        return sum(waited for _, _, waited in self._times) / self._steps

    @property
    def _steps(self) -> int:
        return sum(steps for steps, _, _ in self._times)

    def news_of_data(self) -> str | None:
        """A warning, once, where data are what limits the speed: more than a tenth of the last
        session runs, five or more, was waited for them, and a second in all.
        """
        waited, seconds = self.waited_per_step, self.seconds_per_step
        is_limited = len(self._times) >= FEWEST and waited > LIMITING * seconds
        if self._is_limit_told or not is_limited or self._waited < NOTICED:
            return None
        self._is_limit_told = True
        return (
            f"data: got steps that wait {duration(waited)} of their {duration(seconds)} for data; "
            "expected data to be read while a step computes. Put the files on a faster disk, or "
            "prepare them with data/prepare.py."
        )

    @property
    def tokens_per_second(self) -> float:
        """Training tokens per second over all replicas."""
        return self._stage.tokens_per_step / self.seconds_per_step

    @property
    def flops_per_second(self) -> float:
        """The model's floating-point operations per second over all replicas."""
        return self._flops * self.tokens_per_second

    def _mfu(self, steps: int, seconds: float) -> float | None:
        if self.ceiling is None:
            return None
        speed = self._flops * self._stage.tokens_per_step * steps / seconds
        self.ceiling = max(self.ceiling, speed)  # other work may have run when it was measured
        return speed / self.ceiling

    def seconds_left(self, step: int, tokens: int) -> float:
        """Expected time until the last step, at the pace of this run with everything in it."""
        if step <= self._first_step:
            return 0.0
        pace = (time.perf_counter() - self._begin) / (tokens - self._first_tokens)
        return pace * tokens_ahead(self.config, tokens, self.config.training.steps - step)

    def pieces(self, values: "Mapping[str, Any]") -> "list[Piece]":
        """The line about a step, which is to be called after each, for the smoothed loss.

        Args:
            values: the step's record, by names of `metrics.jsonl`. Steps so far that were left out
                are shown where there are any.
        """
        if values["validation_loss"] is not None:
            self._validation = values
        step, tokens, loss = values["step"], values["tokens"], values["loss"]
        skipped, no_labels = values["skipped"], values.get("no_labels", 0)
        steps = self.config.training.steps
        pieces = [
            Piece(f"step {step:>{len(str(steps))}}/{steps}"),
            Piece(f"loss {loss:.4f}", 3),
            Piece(f"smoothed {self.loss.add(loss):.4f}"),
            *validation_pieces(self._validation),
            Piece(f"lr {values['learning_rate']:.2e}", 6),
            Piece(f"norm {values['gradient_norm']:.3f}", 5),
            *([Piece(f"{skipped} skipped", 1)] if skipped else []),
            *([Piece(f"{no_labels} skipped: no label", 1)] if no_labels else []),
            Piece(si(tokens, "tokens"), 5),
            Piece(si(self.tokens_per_second, "tokens/s"), 4),
            Piece(si(self.flops_per_second, "FLOP/s"), 9),
        ]
        mfu = self._mfu(1, self.seconds_per_step)
        if mfu is not None:
            pieces.append(Piece(f"{mfu:.1%} MFU", 7))
        is_whole = self._stage.tokens_per_step == self.config.tokens_per_step
        if self.limit_seconds is not None and is_whole:
            pieces.append(
                Piece(f"{self.limit_seconds / self.seconds_per_step:.0%} of the limit", 4)
            )
        share = self.waited_per_step / self.seconds_per_step
        if share > SHOWN and self._runs > 1:  # the first batch is always waited for
            told = f"{duration(self.waited_per_step)} ({share:.0%}) waiting for data"
            pieces.append(Piece(told, 3))
        return [*pieces, Piece(f"{duration(self.seconds_left(step, tokens))} left", 2)]


def validation_pieces(found: "Mapping[str, float]") -> "list[Piece]":
    """What a validation found, by its names in `metrics.jsonl`."""
    if not found:
        return [Piece("validation -", 2)]
    text = f"validation {found['validation_loss']:.4f}"
    if "validation_standard_error" in found:
        text += f" ±{found['validation_standard_error']:.4f}"
    parts = [Piece(text, 1)]
    if "training_loss" in found:
        parts.append(Piece(f"on training data {found['training_loss']:.4f}", 8))
    if "validation_bits_per_byte" in found:
        parts.append(Piece(f"{found['validation_bits_per_byte']:.4f} bits/byte", 7))
    return parts
