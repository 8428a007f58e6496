"""Texts that the model writes while it is trained, and at the end: printed, and kept in the run's
folder.
"""

import logging
from collections.abc import Callable, Sequence
from textwrap import indent
from typing import Any

import numpy as np

from popxl_gpt.data.masking import ids_of
from popxl_gpt.data.text_tokenizer import TextTokenizer
from popxl_gpt.demo.job.part import Job, Part, RunState
from popxl_gpt.demo.job.progress_line import line_away
from popxl_gpt.demo.job.step_lines import append_lines, drop_later_lines
from popxl_gpt.demo.job.text import MARK, SampleWriter, whole_lines
from popxl_gpt.utils.errors import LostError, NotFiniteError, UserError, outside_message
from popxl_gpt.utils.runtime import (
    drop_dead_sessions,
    gather_beside,
    runtime_errors_are_told,
)

_LOG = logging.getLogger(__name__)
PROMPT_TOKENS = 64
SAMPLE_TOKENS = 100


class Samples(Part):
    """Lets the model write every so many steps, and at the end."""

    def __init__(self, run: RunState, job: Job):
        super().__init__(run, job)
        self._tokenizer, self._data = job.tokenizer, job.validation_data or job.data
        self._count, self._every = job.options.samples, job.options.sample_every
        if run.is_leader:
            drop_later_lines(run.folder.samples, run.step, "texts")

    def after(self) -> None:
        """Write where that is due: not after the last step, at which it comes anyway."""
        if not self.run.clock.is_last(self.run.step) and self.run.has_passed(self._every):
            with self.run.aside(), line_away():
                self.show()

    def close(self) -> None:
        """Write at the end of a run that has succeeded."""
        if self.run.is_complete and self.run.failure is None:
            self.show()

    def show(self) -> None:
        """Let the model write, where there is a tokenizer. Where it cannot, say why: no step of
        training is to be lost for that.
        """
        run, tokenizer = self.run, self._tokenizer
        if tokenizer is None or self._count <= 0:
            return
        run.each("settle")  # what processes do together, as they agree here
        found, problem = _agreed(lambda: self._prompts(tokenizer))
        if problem is None:
            found, problem = _agreed(
                lambda: SampleWriter(run.session, run.config, tokenizer, found, SAMPLE_TOKENS)
            )
        if problem is None:
            found, problem = _agreed(found.write)
        if run.is_leader and problem is None:
            texts = ({"step": run.step, "prompt": prompt, "text": text} for prompt, text in found)
            append_lines(run.folder.samples, [*texts])
            run.each("wrote", found)
            _print(found)
        elif run.is_leader:
            _LOG.warning("no samples at step %d: %s", run.step, problem)
        drop_dead_sessions()

    def _prompts(self, tokenizer: TextTokenizer) -> "list[list[int]]":
        """Some lines of the data for each text."""
        length = min(PROMPT_TOKENS, max(1, self.run.config.model.sequence_length // 2))
        numbers = [index * (len(self._data) // self._count) for index in range(self._count)]
        return [
            whole_lines(ids_of(self._data.read(np.array([number]))[0, :length]).tolist(), tokenizer)
            for number in numbers
        ]


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
            problems = gather_beside(problem)
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


def _print(texts: "Sequence[tuple[str, str]]") -> None:
    """Print prompts, and what the model made of them."""
    for number, (prompt, text) in enumerate(texts, start=1):
        print(f"\nSample {number}: after {MARK} the model goes on with the text before it.\n")
        print(indent(prompt + MARK + text, "    | ", lambda line: True))
