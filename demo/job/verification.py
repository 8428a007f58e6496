"""Phases that run twice (`--verify_every`): whether they come to the same bytes."""

from collections.abc import Iterator
from contextlib import contextmanager

from popxl_gpt.demo.job.part import Call, Job, Part
from popxl_gpt.execution.verification import due, verified


class Verification(Part):
    """Raises CorruptedError where they do not: nothing of the step is saved then."""

    @classmethod
    def is_wanted(cls, job: Job) -> bool:
        """Whether phases are verified."""
        return job.config.execution.verify_every > 0

    @contextmanager
    def around(self, call: Call) -> Iterator[None]:
        """Verify those phases of the call that are due."""
        run, iterations = self.run, len(call.rates)
        numbers = due(run.config.execution.verify_every, run.step, iterations)
        if call.is_profiled or not numbers:
            yield
            return
        with verified(run.session, run.stage, run.step + iterations, numbers):
            yield
