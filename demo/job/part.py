"""What a run is made of: its state, which all parts see, and what a part of it may do."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from popxl_gpt.config.schedules import stage_of
from popxl_gpt.config.schema import Config
from popxl_gpt.data.dataset import Dataset
from popxl_gpt.data.text_tokenizer import TextTokenizer
from popxl_gpt.demo.job.interruption import Interruption
from popxl_gpt.demo.job.options import TrainOptions
from popxl_gpt.demo.job.run_clock import RunClock
from popxl_gpt.demo.job.run_folder import RunFolder
from popxl_gpt.demo.job.run_memory import RunMemory
from popxl_gpt.demo.job.step_clock import StepClock
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.host import StepResult
from popxl_gpt.execution.overflow import Skipped
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.reports.profile.report import StepProfiler
from popxl_gpt.utils.runtime import compile_seconds


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a run is given."""

    config: Config
    options: TrainOptions
    folder: RunFolder
    data: Dataset
    validation_data: Dataset | None
    tokenizer: TextTokenizer | None
    saved: SavedRun | None
    """The checkpoint that it goes on from."""
    interruption: Interruption
    memory: RunMemory
    profiler: StepProfiler | None
    limit_seconds: float | None
    """Seconds of a step at the machine's physical limit, where that is known."""
    is_leader: bool
    """Whether this process leaves the run's files, and prints."""


@dataclass
class Call:
    """A call of the session: some optimizer steps."""

    rates: "list[float]"
    """The learning rate of each step."""
    is_first: bool
    """Whether its program was not called before."""
    is_last: bool
    """Whether the run ends with it."""
    words: np.ndarray = field(default_factory=lambda: np.empty(0))
    labels: np.ndarray = field(default_factory=lambda: np.empty(0))
    """What it trains on, int [steps * global_batch_size, sequence]."""
    results: "list[StepResult]" = field(default_factory=list)
    seconds: float = 0.0
    waited: float = 0.0
    """Seconds by the clock, and those of them that were waited for data."""


@dataclass(frozen=True)
class Step:
    """An optimizer step that was done."""

    result: StepResult
    rate: float
    is_end: bool
    """Whether its call ended with it: the session has its weights."""


@dataclass(frozen=True)
class Distribution:
    """What is told of some numbers."""

    norm: float
    """The root of the sum of their squares."""
    count: int
    total: float = 0.0
    """Their sum, where there is a histogram."""
    edges: "Sequence[float]" = ()
    """Limits of a histogram's bars, one more than bars."""
    counts: "Sequence[int]" = ()


class RunState:
    """The state of a run, from its first step, or from a checkpoint, to its last."""

    signal: int | None = None
    """The signal that ends the run."""
    failure: Exception | None = None
    """Why training cannot go on, or shall not."""
    is_abandoned = False
    """Whether a signal ends the run that does not wait."""
    is_complete = False
    """Whether training has ended by itself."""
    wants_save = False
    """Whether somebody has asked for a checkpoint."""
    last_record: "dict[str, Any] | None" = None
    """The record of the step that the run goes on from; in instance 0 alone."""

    def __init__(self, job: Job, parts: "Sequence[type[Part]]"):
        self.config, self.folder, saved = job.config, job.folder, job.saved
        self.step, self.tokens = 0, 0
        """Optimizer steps done, and tokens seen."""
        if saved is not None:
            self.step, self.tokens = saved.position.step, saved.position.tokens or 0
        self.first_step = self.step
        self.entered = ExitStack()
        """Has the session while training goes on."""
        self.kept_steps = job.config.training.steps
        """The steps of the configuration that the run's folder has."""
        self.fingerprint = job.data.fingerprint
        """The fingerprint of the data as they are now."""
        if saved is not None:
            saved.check_data(self.fingerprint)
        self.is_leader = job.is_leader
        self.build(saved)
        self.skipped = Skipped.of(self.session)
        self.saved_step = None if saved is None else self.step
        """The newest step that is on the disk."""
        writes = job.tokenizer is not None and job.options.samples > 0
        self.clock = RunClock(job.config, saved, sum(self.built.values()) if writes else 0.0)
        self.step_clock = StepClock()
        self.parts = [part(self, job) for part in parts if part.is_wanted(job)]

    def build(self, saved: SavedRun | None) -> None:
        """Make the program of the steps from here on, with the state that was saved."""
        self.stage = stage_of(self.config, self.tokens)
        """The configuration of the steps from here on, which a batch that grows changes."""
        begin = time.perf_counter()
        self.session = pretraining(self.stage)
        compiled = compile_seconds(self.session)
        took = time.perf_counter() - begin - compiled
        self.built = {"build_seconds": round(took, 3), "compile_seconds": round(compiled, 3)}
        """Seconds that the program took: to be built, with its weights, and to be compiled."""
        if saved is not None:
            saved.restore(self.session)

    @property
    def is_over(self) -> bool:
        """Whether training has come to its last step, or can or shall not go on to it."""
        return self.clock.is_last(self.step) or self.failure is not None

    @property
    def is_doubtful(self) -> bool:
        """Whether weights may be worth less than those of a checkpoint before: they have only led
        to skipped steps.
        """
        return self.skipped.in_a_row > 0

    def has_passed(self, every: int) -> bool:
        """Whether the last call of the session came to a multiple of so many steps, or past one: of
        a run that ends by the clock, a call may end anywhere. Never for 0.
        """
        before = self.step - self.config.execution.device_iterations
        return every > 0 and self.step // every > before // every

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A block that is no part of a step's time."""
        with self.step_clock.left_out():
            yield

    def each(self, event: str, *details: Any) -> None:
        """Let each part do what it does at an event, a method of `Part`."""
        for part in self.parts:
            getattr(part, event)(*details)

    def each_surely(self, event: str, *details: Any) -> None:
        """Do as `each`, but go on where a part fails; the error is raised after the last part."""
        with ExitStack() as stack:
            for part in reversed(self.parts):
                stack.callback(getattr(part, event), *details)

    def fields(self) -> "dict[str, Any]":
        """The parts' fields of the step's record."""
        return {name: value for part in self.parts for name, value in part.fields().items()}

    def saving(self) -> "dict[str, Any]":
        """What a checkpoint says of the parts, which they make ready for it."""
        return {name: value for part in self.parts for name, value in part.saving().items()}


class Part:
    """Something that a run does beside its steps. All processes have the same parts, but for those
    that only write or print: instance 0 has them.
    """

    def __init__(self, run: RunState, job: Job):
        self.run = run

    @classmethod
    def is_wanted(cls, job: Job) -> bool:
        """Whether a run has this part."""
        return True

    # In the loop

    def begin(self) -> None:
        """Runs before the first step."""

    def vote(self) -> Any:
        """What the others are to hear before each step, as JSON."""
        return None

    def hear(self, votes: "Sequence[Any]") -> None:
        """What the part says in all processes, this one among them, in their order."""

    def between(self) -> bool:
        """Do what is due between steps. Returns whether anything was: then all vote again."""
        return False

    def around(self, call: Call) -> AbstractContextManager[None]:
        """A block around a call of the session."""
        return nullcontext()

    def called(self, call: Call) -> None:
        """Runs after a call, before its steps are counted."""

    def stepped(self, step: Step) -> None:
        """Runs after each step of a call."""

    def fields(self) -> "dict[str, Any]":
        """What the record of this step has of this part, by names of `metrics.jsonl`."""
        return {}

    def after(self) -> None:
        """Runs after the steps of a call are recorded."""

    # At events

    def stage_begins(self) -> None:
        """Runs when the program is another one from here on."""

    def saving(self) -> "dict[str, Any]":
        """Runs before the state is saved: what belongs to it is checked, or brought onto the disk.
        Returns what the checkpoint says of this part, as fields of `Position`.
        """
        return {}

    def validated(self, values: "dict[str, float]") -> None:
        """Runs when what the run goes on from is validated, before its first step."""

    def recorded(self, values: "dict[str, Any]") -> None:
        """Runs when a step is recorded."""

    def wrote(self, texts: "Sequence[tuple[str, str]]") -> None:
        """Runs when the model has written: prompts, and what it made of them."""

    def measured(self, found: "Mapping[str, Distribution]") -> None:
        """Runs when norms are measured, by `kind/layer/role`."""

    def settle(self) -> None:
        """Complete what goes on beside training."""

    # At the end

    def save(self) -> None:
        """Save this step, whatever it takes, while there is the session."""

    def end(self) -> None:
        """Runs after training, however it ended. The last part is the first to end."""

    def close(self) -> None:
        """Runs after all that: what is left to do when the session is no more."""
