"""Texts that the model writes while it is trained, and at the end: printed, and kept in the run's
folder.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import indent

import numpy as np
from tokenizers import Tokenizer

from popxl_gpt.config import NotFiniteError
from popxl_gpt.config.plain_files import append_plain
from popxl_gpt.data import Dataset
from popxl_gpt.data.masking import ids_of
from popxl_gpt.demo.commands import TrainOptions as Options
from popxl_gpt.demo.run_folder import RunFolder
from popxl_gpt.demo.text import MARK, whole_lines, write_samples
from popxl_gpt.demo.training_run import TrainingRun

_LOG = logging.getLogger(__name__)
PROMPT_TOKENS = 64
SAMPLE_TOKENS = 100


@dataclass(frozen=True)
class Samples:
    """Texts that the model writes while it is trained."""

    tokenizer: Tokenizer | None
    data: Dataset
    options: Options

    def after_steps(self, run: TrainingRun, steps: int) -> None:
        """Write them where they are due: not after the last step, at which they come anyway."""
        every, end = self.options.sample_every, run.config.training.steps
        if not every or run.step >= end or run.step // every == (run.step - steps) // every:
            return
        with run.away():
            show_samples_if_finite(run, self.tokenizer, self.data, self.options.samples)


def show_samples_if_finite(
    run: TrainingRun, tokenizer: Tokenizer | None, data: Dataset, samples: int
) -> None:
    """Let the model write, where there is a tokenizer and its logits are finite."""
    if tokenizer is not None and samples > 0:
        try:
            show_samples(run, tokenizer, data, samples)
        except NotFiniteError as error:  # everything that matters is saved
            _LOG.warning("no samples: %s. Train with a lower learning rate.", error)


def show_samples(run: TrainingRun, tokenizer: Tokenizer, data: Dataset, samples: int) -> None:
    """Print and keep texts that the model writes, each after some lines of the data."""
    length = min(PROMPT_TOKENS, max(1, run.config.model.sequence_length // 2))
    numbers = [index * (len(data) // samples) for index in range(samples)]
    prompts = [
        whole_lines(ids_of(data.read(np.array([number]))[0, :length]).tolist(), tokenizer)
        for number in numbers
    ]
    texts = write_samples(run.session, run.config, tokenizer, prompts, SAMPLE_TOKENS)
    if run.records is None:
        return
    keep_samples(run.folder, run.step, texts)
    if run.records.wandb is not None:
        run.records.wandb.log_samples(run.step, texts)
    for number, (prompt, text) in enumerate(texts, start=1):
        print(f"\nSample {number}: after {MARK} the model goes on with the text before it.\n")
        print(indent(prompt + MARK + text, "    | ", lambda line: True))


def keep_samples(folder: RunFolder, step: int, texts: "Sequence[tuple[str, str]]") -> None:
    """Append prompts, and what the model made of them, to the run's samples."""
    lines = [
        json.dumps({"step": step, "prompt": prompt, "text": text}) + "\n" for prompt, text in texts
    ]
    try:
        with open(append_plain(folder.samples), "a", encoding="ascii") as file:
            file.writelines(lines)
    except OSError as error:
        _LOG.warning("%s: not written: '%s'.", folder.samples, error.strerror)
