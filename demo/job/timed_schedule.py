"""A schedule that ends with the time: warm-up, stable, decay.

The rate stays until a share of the time has gone. Then the decay is fixed: from this step to that
by which, at the pace of the run, the time is over. Where the pace changes, the rest of the decay is
fixed anew. What is fixed stands in checkpoints, so a run that goes on has the same rates.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

from popxl_gpt.config.schedules import batch_scale
from popxl_gpt.config.schema import Training

TOLERANCE = 0.005
"""Share of the time that the end may be from it before it is fixed anew."""
WINDOW, LEAST_WINDOW = 0.25, 0.02
"""Shares of a run's steps, the last of which tell the pace of the next: as many as are left, but no
more and no fewer than these shares.
"""
LEAST_CALLS = 3
"""Calls of which the pace is a mean, at least, once there are as many."""
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
        scale = batch_scale(training)
        self.highest = scale * training.learning_rate
        self.lowest = scale * training.minimum_learning_rate
        self.rate, self.end = self.highest, max(training.steps, done + iterations)
        """The rate at that step, and the steps of the run: expected ones before that."""
        if state is not None and state["seconds"] == seconds:
            self.begin, self.rate, self.end = state["begin"], state["rate"], state["end"]
        self._stable = 1.0 - training.decay_share
        self._times: deque[tuple[int, float]] = deque(maxlen=KEPT)

    @property
    def state(self) -> dict[str, Any] | None:
        """What a checkpoint keeps; None before the decay is fixed."""
        if self.begin is None:
            return None
        return {"seconds": self.seconds, "begin": self.begin, "rate": self.rate, "end": self.end}

    def learning_rate(self, step: int) -> float:
        """The rate of an optimizer step, counted from 0. That of a step of the decay is the line's
        in the middle of the step, so that each of them falls, and be it the only one.
        """
        return self._at(step) if self.begin is None else self._at(step + 0.5)

    def _at(self, position: float) -> float:
        """The rate at a point of the schedule."""
        warmup = self.training.warmup_steps
        if self.begin is None:
            is_warm = position >= warmup
            return self.highest if is_warm else self.highest * (position + 1) / (warmup + 1)
        left = max(0.0, 1.0 - (position - self.begin) / max(1, self.end - self.begin))
        return self.lowest + (self.rate - self.lowest) * left

    def tell(self, step: int, elapsed: float, closing: float) -> int:
        """Take the time after a call. Returns the steps of the run, as far as they are known.

        Args:
            step: steps done.
            elapsed: seconds since the run began.
            closing: seconds that validation, checkpoint and texts take after the last step.
        """
        self._times.append((step, elapsed))
        if self.begin is not None and step >= self.end:
            self.end = step
            return self.end
        left, call = self.seconds - closing - elapsed, self._call_seconds()
        if call is None:
            is_due = left <= 0
            expected = step if is_due else max(self.end, step + self.iterations)
        else:  # the last one is made where half of it fits
            calls = int(left / call) if left >= call else max(0, round(left / call))
            expected = step + calls * self.iterations
            if self.begin is None:
                is_due = calls == 0 or elapsed >= self._stable * (self.seconds - closing)
            else:
                moved = abs(expected - self.end) / self.iterations
                is_due = moved * call > TOLERANCE * self.seconds
        if is_due:
            self.rate, self.begin = self._at(step), step
        if is_due or self.begin is None:
            self.end = expected
        return self.end

    def _call_seconds(self) -> float | None:
        """Seconds of a call with all that comes between; None after the first one of a session."""
        last_step, last = self._times[-1]
        first_step = self._times[0][0]
        done, left = last_step - first_step, self.end - last_step
        if done == 0:
            return None
        window = min(WINDOW * done, max(left, LEAST_WINDOW * done))
        since = last_step - max(LEAST_CALLS * self.iterations, window)
        earlier = [point for point in self._times if point[0] <= since]
        step, elapsed = earlier[-1] if earlier else self._times[0]
        return (last - elapsed) / (last_step - step) * self.iterations
