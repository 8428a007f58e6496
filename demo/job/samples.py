"""Texts that the model writes while it is trained, and at the end: printed, and kept in the run's
folder.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Any

import numpy as np
import popdist

from popxl_gpt.data.dataset import Dataset
from popxl_gpt.data.masking import ids_of
from popxl_gpt.data.text_tokenizer import TextTokenizer
from popxl_gpt.demo.job.options import TrainOptions as Options
from popxl_gpt.demo.job.samples_file import keep_samples
from popxl_gpt.demo.job.text import MARK, SampleWriter, whole_lines
from popxl_gpt.demo.job.training_run import TrainingRun
from popxl_gpt.utils.errors import LostError, NotFiniteError, UserError, outside_message
from popxl_gpt.utils.runtime import (
    drop_dead_sessions,
    gather_beside,
    runtime_errors_are_told,
)

_LOG = logging.getLogger(__name__)
PROMPT_TOKENS = 64
SAMPLE_TOKENS = 100


@dataclass(frozen=True)
class Samples:
    """Texts that the model writes while it is trained."""

    tokenizer: TextTokenizer | None
    data: Dataset
    options: Options

    def after_steps(self, run: TrainingRun) -> None:
        """Write them where they are due: not after the last step, at which they come anyway."""
        if run.clock.is_last(run.step) or not run.has_passed(self.options.sample_every):
            return
        with run.away():
            show_samples_if_possible(run, self.tokenizer, self.data, self.options.samples)


def show_samples_if_possible(
    run: TrainingRun, tokenizer: TextTokenizer | None, data: Dataset, samples: int
) -> None:
    """Let the model write, where there is a tokenizer. Where it cannot, say why: no step of
    training is to be lost for that.
    """
    if tokenizer is None or samples <= 0:
        return
    run.wait_for_checkpoint()  # which processes write together, as they agree here
    found, problem = _agreed(lambda: _prompts(run, tokenizer, data, samples))
    if problem is None:
        found, problem = _agreed(
            lambda: SampleWriter(run.session, run.config, tokenizer, found, SAMPLE_TOKENS)
        )
    if problem is None:
        found, problem = _agreed(found.write)
    if problem is None:
        show_samples(run, found)
    elif run.is_leader:
        _LOG.warning("no samples at step %d: %s", run.step, problem)
    drop_dead_sessions()


def _agreed(work: "Callable[[], Any]") -> "tuple[Any, str | None]":
    """What some work of each process gives, or why that of some process gives nothing, where that
    is no mistake of the program.

    They agree beside the program's own messages: a process that fails alone, while others wait for
    it in the work, ends the run by its own error.
    """
    found, problem, failure = None, None, None
    try:
        with runtime_errors_are_told():
            found = work()
    except Exception as error:
        problem, failure = _told(error), error
        if problem is None:
            raise
    try:
        with runtime_errors_are_told():
            problems = gather_beside(problem, popdist.getNumInstances())
    except LostError:
        if failure is not None:
            raise failure from failure.__cause__
        raise
    finally:
        del failure  # it holds what the work had made
    return found, next((told for told in problems if told is not None), None)


def _told(error: Exception) -> str | None:
    """What to say of an error; None of the program's own."""
    if isinstance(error, NotFiniteError):
        return f"{error} Train with a lower learning rate."
    message = str(error) if isinstance(error, UserError) else outside_message(error)
    return None if message is None else f"{message} Or let fewer be written, or none: --samples."


def _prompts(
    run: TrainingRun, tokenizer: TextTokenizer, data: Dataset, samples: int
) -> "list[list[int]]":
    """Some lines of the data for each text."""
    length = min(PROMPT_TOKENS, max(1, run.config.model.sequence_length // 2))
    numbers = [index * (len(data) // samples) for index in range(samples)]
    return [
        whole_lines(ids_of(data.read(np.array([number]))[0, :length]).tolist(), tokenizer)
        for number in numbers
    ]


def show_samples(run: TrainingRun, texts: "Sequence[tuple[str, str]]") -> None:
    """Print and keep prompts, and what the model made of them."""
    if run.records is None:
        return
    keep_samples(run.folder.samples, run.step, texts)
    if run.records.wandb is not None:
        run.records.wandb.log_samples(run.step, texts)
    for number, (prompt, text) in enumerate(texts, start=1):
        print(f"\nSample {number}: after {MARK} the model goes on with the text before it.\n")
        print(indent(prompt + MARK + text, "    | ", lambda line: True))
