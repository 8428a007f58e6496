"""A schedule that ends with the time: warm-up, stable, decay.

The rate stays until a share of the time has gone. Then the decay is fixed: from this step to that
by which, at the pace of the run, the time is over. Where the pace changes, the rest of the decay is
fixed anew. What is fixed stands in checkpoints, so a run that goes on has the same rates.
"""

import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from popxl_gpt.config.schema import Training

TOLERANCE = 0.005
"""Share of the time that the end may be from it before it is fixed anew."""
WINDOW, LEAST_WINDOW = 0.25, 0.02
"""Shares of a run's steps, the last of which tell the pace of the next: as many as are left, but no
more and no fewer than these shares.
"""
LEAST_CALLS = 3
"""Calls of which the pace is a mean."""
KEPT = 4096
"""Moments that are remembered for that."""


class TimedSchedule:
    """Learning rates, and the last step, of a run that has so many seconds.

    Args:
        training: its rates, its steps of warm-up, and what share of its steps its decay is, which
            is that of the time.
        seconds: of the whole run.
        iterations: steps of a call.
        done: steps before.
        state: what `state` was when the run was saved; None: it is new.
    """

    def __init__(
        self,
        training: Training,
        seconds: float,
        iterations: int = 1,
        done: int = 0,
        state: Mapping[str, Any] | None = None,
    ):
        self.training, self.seconds, self.iterations = training, seconds, iterations
        self.begin: int | None = None
        """Steps done when the decay, or what is left of it, was fixed."""
        self.rate, self.end = training.learning_rate, max(training.steps, done + iterations)
        """The rate at that step, and the steps of the run: expected ones before that."""
        if state is not None and state["seconds"] == seconds:
            self.begin, self.rate, self.end = state["begin"], state["rate"], state["end"]
        self._stable = 1.0 - training.decay / training.steps
        self._times: deque[tuple[int, float]] = deque(maxlen=KEPT)

    @property
    def state(self) -> dict[str, Any] | None:
        """What a checkpoint keeps; None before the decay is fixed."""
        if self.begin is None:
            return None
        return {"seconds": self.seconds, "begin": self.begin, "rate": self.rate, "end": self.end}

    def learning_rate(self, step: int) -> float:
        """The rate of an optimizer step, counted from 0."""
        highest, lowest = self.training.learning_rate, self.training.minimum_learning_rate
        if step < self.training.warmup_steps and self.begin is None:
            return highest * (step + 1) / (self.training.warmup_steps + 1)
        if self.begin is None:
            return highest
        left = max(0.0, 1.0 - (step - self.begin) / max(1, self.end - self.begin))
        return lowest + (self.rate - lowest) * left

    def tell(self, step: int, elapsed: float, closing: float) -> int:
        """Take the time after a call. Returns the steps of the run, as far as they are known.

        Args:
            step: steps done.
            elapsed: seconds since the run began.
            closing: seconds that validation, checkpoint and texts take after the last step.
        """
        self._times.append((step, elapsed))
        pace = self._pace()
        is_over = self.begin is not None and step >= self.end
        if pace is None or is_over:
            self.end = max(self.end, step if is_over else step + self.iterations)
            return self.end
        left = self.seconds - closing - elapsed
        calls = max(1, int(left / (pace * self.iterations)))
        expected = step + calls * self.iterations
        if self.begin is None:
            is_due = elapsed >= self._stable * (self.seconds - closing)
        else:
            is_due = abs(expected - self.end) * pace > TOLERANCE * self.seconds
        if is_due:
            self.rate, self.begin = self.learning_rate(step), step
        if is_due or self.begin is None:
            self.end = expected
        return self.end

    def _pace(self) -> float | None:
        """Seconds of a step with all that comes between; None where there are too few."""
        last_step, last = self._times[-1]
        first_step = self._times[0][0]
        done, left = last_step - first_step, self.end - last_step
        window = min(WINDOW * done, max(left, LEAST_WINDOW * done))
        since = last_step - max(LEAST_CALLS * self.iterations, window)
        earlier = [point for point in self._times if point[0] <= since]
        if not earlier:
            return None
        step, elapsed = earlier[-1]
        return (last - elapsed) / (last_step - step)


def since_start() -> float:
    """Seconds since this process was started, as the system counts them."""
    text = Path("/proc/self/stat").read_text(encoding="ascii")
    ticks = int(text.rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
