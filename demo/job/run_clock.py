"""The time of a run: since it began, and what is left where it has so many minutes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from popxl_gpt.config.schedules import learning_rate
from popxl_gpt.config.schema import Config, Training
from popxl_gpt.demo.job.timed_schedule import TimedSchedule
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.planning.memory import state_bytes
from popxl_gpt.execution.planning.sizing import ENDING
from popxl_gpt.utils.program_clock import since_start
from popxl_gpt.utils.runtime import gather

WRITTEN = 2e8
"""Bytes of a checkpoint that a disk takes per second, at least."""


class RunClock:
    """Seconds of a run, as if nothing had stopped it, and its learning rates.

    Args:
        saved: the checkpoint it goes on from, which may have a schedule that ends by the clock.
        texts: seconds until the model writes at the end, by a program of its own, which takes about
            as long to build as that of training; 0: it does not.
    """

    def __init__(
        self,
        config: Config,
        saved: SavedRun | None,
        texts: float = 0.0,
    ):
        self.config, self._texts = config, texts
        minutes = config.training.minutes
        done, state = (0, None) if saved is None else (saved.position.step, saved.position.schedule)
        iterations = config.execution.device_iterations
        self.schedule = (
            None
            if minutes is None
            else TimedSchedule(config.training, 60.0 * minutes, iterations, done, state)
        )
        # a run of so many minutes begins with its program
        self._begin = time.monotonic() - (0.0 if minutes is None else since_start())
        before = None if saved is None or minutes is None else saved.position.elapsed
        self._is_told = before is not None
        self._begin -= before or 0.0
        self._validation = 0.0

    def go_on(self, seconds: float) -> None:
        """Count so many seconds of training before this process, where no checkpoint says more."""
        if not self._is_told:
            self._begin -= seconds

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._begin

    @property
    def state(self) -> dict[str, Any] | None:
        """What a checkpoint keeps of the schedule."""
        return None if self.schedule is None else self.schedule.state

    @property
    def elapsed(self) -> float | None:
        """What a checkpoint keeps of the minutes: seconds that are used; None without minutes."""
        return None if self.schedule is None else round(self.seconds, 3)

    @property
    def steps(self) -> int:
        """The steps of the whole run, as far as they are known."""
        return self.config.training.steps if self.schedule is None else self.schedule.end

    def is_last(self, step: int) -> bool:
        """Whether a run is over after so many steps: never at an estimate of them."""
        is_fixed = self.schedule is None or self.state is not None
        return is_fixed and step >= self.steps

    def training(self, steps: int) -> Training:
        """What a run of so many steps keeps in its configuration: its decay has the same share of
        them as of those that were expected, for a run that goes on with more time.
        """
        training, decay = self.config.training, self.config.training.decay_steps
        if decay is not None:
            decay = max(1, round(training.decay_share * steps))
        return replace(training, steps=steps, decay_steps=decay)

    def learning_rate(self, step: int) -> float:
        """The learning rate of an optimizer step, counted from 0."""
        if self.schedule is None:
            return learning_rate(self.config.training, step)
        return self.schedule.learning_rate(step)

    def called(self, step: int) -> int:
        """Take the time after a call, which all processes take from the first. Returns the steps of
        the run.
        """
        if self.schedule is not None:
            elapsed: float = gather(self.seconds)[0]
            closing: float = gather(self._closing())[0]
            return self.schedule.tell(step, elapsed, closing)
        return self.steps

    @contextmanager
    def validating(self) -> Iterator[None]:
        """A block around a validation. That of the last step is expected to take as long."""
        begin = time.monotonic()
        yield
        self._validation = time.monotonic() - begin

    def _closing(self) -> float:
        """Seconds from the last step to the end: validation, checkpoint, and texts."""
        saving = state_bytes(self.config) / WRITTEN
        return ENDING + self._validation + saving + self._texts
