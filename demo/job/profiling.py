"""Calls of the session that are recorded: one (`--profile`), or one of each so many steps
(`--profile_every`).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from popxl_gpt.demo.job.part import Call, Job, Part, RunState
from popxl_gpt.demo.job.progress_line import line_away
from popxl_gpt.execution.reports.profile.report import WARM_UP, StepProfiler


@contextmanager
def _recorded(run: RunState, profiler: StepProfiler, is_last: bool) -> Iterator[None]:
    """A block around a call that is recorded. What is shown of it is no part of the next step."""
    with ExitStack() as shown, line_away(), profiler.around(run.session, is_last):
        yield
        shown.enter_context(run.aside())


class Profiling(Part):
    """Records calls until there is a profile."""

    def __init__(self, run: RunState, job: Job):
        super().__init__(run, job)
        assert job.profiler is not None
        self._profiler = job.profiler
        self._profiler.itself = job.memory.itself

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
        with _recorded(self.run, self._profiler, call.is_last):
            yield

    def stage_begins(self) -> None:
        """Count calls of the new program."""
        self._profiler.begin_again(self.run.stage)


class RegularProfiles(Part):
    """Records the calls that end with a multiple of so many steps, each after others with probes,
    which fill caches.
    """

    _profiler: StepProfiler | None = None

    def __init__(self, run: RunState, job: Job):
        super().__init__(run, job)
        self._options, self._itself = job.options, job.memory.itself

    @classmethod
    def is_wanted(cls, job: Job) -> bool:
        """Whether they are asked for."""
        return job.options.profile_every > 0

    @contextmanager
    def around(self, call: Call) -> Iterator[None]:
        """Record the call, where it is due, or run it with probes, where one is due soon."""
        run, every, steps = self.run, self._options.profile_every, len(call.rates)
        ahead = run.step + (WARM_UP + 1) * steps
        if ahead // every == run.step // every:
            yield
            return
        due = (run.step // every + 1) * every
        folder = run.folder.path
        if self._profiler is None:
            kept = folder / "profiles" / f"step_{due:08}"
            self._profiler = StepProfiler(run.stage, self._options, folder, self._itself, kept)
        is_due = run.step + steps >= due
        with _recorded(run, self._profiler, is_due):
            yield
        if is_due:
            self._profiler = None

    def stage_begins(self) -> None:
        """Leave what was begun with the program before."""
        self._profiler = None
