"""`--profile`: one call of the session is recorded."""

from collections.abc import Iterator
from contextlib import contextmanager

from popxl_gpt.demo.job.part import Call, Job, Part, RunState
from popxl_gpt.demo.job.progress_line import line_away


class Profiling(Part):
    """Records calls until there is a profile."""

    def __init__(self, run: RunState, job: Job):
        super().__init__(run, job)
        assert job.profiler is not None
        self._profiler = job.profiler

    @classmethod
    def is_wanted(cls, job: Job) -> bool:
        """Whether a profile is asked for."""
        return job.profiler is not None

    @contextmanager
    def around(self, call: Call) -> Iterator[None]:
        """Record the call; print the profile above the line of progress."""
        if self._profiler.is_done:
            yield
            return
        with line_away(), self._profiler.around(self.run.session, call.is_last):
            yield

    def stage_begins(self) -> None:
        """Count calls of the new program."""
        self._profiler.begin_again(self.run.stage)
