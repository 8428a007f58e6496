"""The time of each step by what it is spent on."""

from typing import Any

from popxl_gpt.demo.job.part import Call, Job, Part, RunState
from popxl_gpt.utils.runtime import run_times

PASSES = ("forward", "backward", "update")
"""The laps of a step. The head's forward pass is in the backward one, as it is one phase."""


class StepTimes(Part):
    """Takes the time of passes, and of waiting within them, of each call in this process."""

    def __init__(self, run: RunState, job: Job):
        super().__init__(run, job)
        self._fields: dict[str, float] = {}

    def called(self, call: Call) -> None:
        """Take it, for a step on average."""
        found = run_times(self.run.session)
        seconds = {name: found.laps.get(name, 0.0) for name in PASSES}
        seconds |= {"rows": found.waited_for_rows, "others": found.waited_for_others}
        steps = len(call.rates)
        self._fields = {f"{name}_seconds": round(s / steps, 6) for name, s in seconds.items()}

    def fields(self) -> "dict[str, Any]":
        """The seconds of a step."""
        return self._fields
