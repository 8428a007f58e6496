"""The batches that a run trains on, read before each call of the session."""

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from popxl_gpt.config.schema import Config
from popxl_gpt.data.dataset import Dataset
from popxl_gpt.data.loader import BatchLoader
from popxl_gpt.demo.job.part import Call, Job, Part, RunState
from popxl_gpt.execution.host import data_share
from popxl_gpt.utils.errors import DataError, failure_number, numbered

Told = tuple[str, int] | None
"""What processes tell each other of a problem: its words, and the number of the failure."""


class Batches(Part):
    """Reads ahead, so that processes agree on data that some of them cannot read."""

    _next: "list[tuple[np.ndarray, np.ndarray]] | None" = None
    """The batches of the next call of the session, once they are read."""
    _error: DataError | None = None
    """Why they cannot be read."""
    _problems: "Sequence[Told]" = ()

    def __init__(self, run: RunState, job: Job):
        super().__init__(run, job)
        self._data = job.data
        self._loader = _loader(run.stage, job.data, run.step, run.tokens)

    def vote(self) -> "tuple[Told, float]":
        """The problem of the next call's batches, if one follows; and the seconds waited so far."""
        if not self.run.is_over and self._next is None:
            iterations = self.run.config.execution.device_iterations
            try:
                with self.run.step_clock.waiting():
                    steps = range(self.run.step, self.run.step + iterations)
                    self._next = [self._loader.batch(step) for step in steps]
            except DataError as error:
                self._error = error
        return told_of(self._error), self.run.step_clock.waited

    def hear(self, votes: "Sequence[tuple[Told, float]]") -> None:
        """Note whose data cannot be read; all wait for the last."""
        self._problems, waited = zip(*votes)
        self.run.step_clock.waited = max(waited)

    def between(self) -> bool:
        """Raise DataError where some process has no data for the next step."""
        if any(self._problems):
            raise_problem(self._error, self._problems)
        return False

    def prepare(self, call: Call) -> None:
        """Give the call its batches."""
        assert self._next is not None
        words, labels = zip(*self._next)
        call.words, call.labels = _joined(words), _joined(labels)
        self._next = None

    def stage_begins(self) -> None:
        """Read batches of another size."""
        self._loader.close()
        run = self.run
        self._loader, self._next = _loader(run.stage, self._data, run.step, run.tokens), None

    def abandon(self) -> None:
        """Wait for no file."""
        self._loader.close(wait=False)

    def end(self) -> None:
        """Read no more."""
        self._loader.close()


def told_of(problem: DataError | None) -> Told:
    """A problem, as processes tell each other of it."""
    return None if problem is None else (str(problem), failure_number(problem))


def raise_problem(own: DataError | None, told: "Sequence[Told]") -> NoReturn:
    """Raise the problem of this process, or else that of the first which has told one."""
    if own is not None:
        raise own
    instance, problem = next(each for each in enumerate(told) if each[1] is not None)
    assert problem is not None
    raise DataError(f"instance {instance}: {problem[0]}") from numbered(problem[1])


def _loader(config: Config, dataset: Dataset, step: int, tokens: int) -> BatchLoader:
    """Batches of a run that has done so many steps and seen so many tokens, in batches of whatever
    size.
    """
    share = data_share(config)
    samples = tokens // config.model.sequence_length
    return BatchLoader(
        dataset,
        config.training.global_batch_size,
        seed=config.training.seed,
        instance=share.index,
        instances=share.count,
        accumulation_steps=config.gradient_accumulation,
        shift=samples - step * config.training.global_batch_size,
    )


def _joined(arrays: "Sequence[np.ndarray]") -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
