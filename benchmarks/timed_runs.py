"""One training run against the clock, of `time_to_loss.py`: a process of its own.

The clock begins with the process, and the loss on held-out text is measured after it.
"""

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.harness import Figures, multiply_ceiling
from popxl_gpt.config.schedules import learning_rate
from popxl_gpt.config.schema import Training
from popxl_gpt.data.dataset import Dataset, TokenDataset
from popxl_gpt.data.loader import BatchLoader
from popxl_gpt.data.masking import ids_of, labels_of

SCHEDULE_STEPS = 10_000
"""Steps of a schedule that time drives: a share of the time left is a share of these."""
EVALUATED = 32
"""Sequences that are evaluated at a time."""

Batch = tuple[np.ndarray, np.ndarray]
"""Ids and labels, int [sequences, S] each."""
Losses = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Nats of each label: ids and labels, int [EVALUATED, S], to float32 [EVALUATED, S]."""


class Recipe(Protocol):
    """What is trained, and how."""

    sequences: int
    """Sequences of an optimizer step."""
    steps_at_once: int
    """Optimizer steps of a call."""

    def train(self, batches: list[Batch], factor: float) -> float:
        """Optimizer steps, with rates times a factor; returns the last loss."""

    def evaluating(self) -> AbstractContextManager[Losses]:
        """Within it, losses of the weights as they are."""


@dataclass
class Record:
    """What a run has done."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_seconds: float = 0.0
    """When the first call had ended: start-up and compiling."""
    call_seconds: list[float] = field(default_factory=list)
    """Seconds of the calls after it."""
    bits_per_byte: float | None = None
    """Over the held-out text, at the end."""
    bytes: int = 0
    """Of it that were scored."""

    def figures(self) -> Figures:
        """What the benchmark keeps."""
        kept = asdict(self)
        calls = kept.pop("call_seconds")
        return {**kept, "call_seconds": statistics.median(calls) if calls else None}


def bits_per_byte(
    dataset: Dataset, token_bytes: np.ndarray, losses_of: Losses
) -> tuple[float, int]:
    """Bits for all tokens of held-out text over the bytes that they stand for: the same bytes for
    every recipe, each token once. And how many bytes that are.
    """
    nats, text = 0.0, 0
    for start in range(0, len(dataset), EVALUATED):
        numbers = np.arange(start, min(start + EVALUATED, len(dataset)))
        filled = np.concatenate([numbers, np.repeat(numbers[:1], EVALUATED - len(numbers))])
        tokens = dataset.read(filled)
        labels = labels_of(tokens[:, 1:])
        losses = losses_of(ids_of(tokens[:, :-1]), labels)[: len(numbers)]
        begin, end = dataset.counted(numbers).T[..., None]
        places = np.arange(labels.shape[1])
        is_counted = (begin <= places) & (places < end)
        nats += float(losses[is_counted].sum(dtype=np.float64))
        text += int(token_bytes[labels[: len(numbers)][is_counted]].sum())
    return nats / math.log(2) / text, text


def factor_at(settings: Figures, progress: float) -> float:
    """The learning rate over its highest, by the application's schedules."""
    warmup = int(settings["warmup"] * SCHEDULE_STEPS)
    decay = int(settings.get("decay", 0.0) * SCHEDULE_STEPS)
    training = Training(
        steps=SCHEDULE_STEPS,
        learning_rate=1.0,
        minimum_learning_rate=settings["lowest"],
        schedule=settings["schedule"],
        warmup_steps=warmup,
        decay_steps=decay or None,
    )
    return learning_rate(training, min(SCHEDULE_STEPS - 1, int(progress * SCHEDULE_STEPS)))


class Run:
    """A recipe against the clock.

    Args:
        options: `kind` of recipe and its `settings`, `seed`, `text` (a folder that data/prepare.py
            made), `seconds` to train, `steps` at most (0: as many as the seconds hold), whether it
            `is_probe`, which is not evaluated, and when it `started` on the monotonic clock.
    """

    def __init__(self, options: Figures, recipe: Callable[[Figures], Recipe]):
        self.options, self.record, self.text = options, Record(), Path(options["text"])
        self.sizes = options["sequence_length"], options["vocabulary_size"]
        data = TokenDataset(str(self.text / "train-*.tfrecord"), *self.sizes)
        self.recipe, seed = recipe(options), options["seed"]
        self.loader = BatchLoader(data, self.recipe.sequences, seed=seed, prefetch=2)

    @property
    def seconds(self) -> float:
        """Since the process was started."""
        return time.monotonic() - self.options["started"]

    def whole(self) -> None:
        """Train until the time is over, and measure the loss."""
        while self._has_time():
            self._advance()
        self.record.seconds = self.seconds
        if self.options["is_probe"]:
            return
        files = str(self.text / "validation-*.tfrecord")
        held_out = TokenDataset(files, *self.sizes, stride=self.sizes[0])
        text_bytes = np.array(self.options["token_bytes"])
        with self.recipe.evaluating() as losses_of:
            found = bits_per_byte(held_out, text_bytes, losses_of)
        self.record.bits_per_byte, self.record.bytes = found

    def _has_time(self) -> bool:
        """Whether another call is over in time, if it takes what the last ones took."""
        calls, most = self.record.call_seconds, self.options["steps"]
        if most and self.record.step >= most:
            return False
        usual = statistics.median(calls[-9:]) if calls else 0.0
        return self.seconds + usual < self.options["seconds"]

    def _advance(self) -> None:
        record, count = self.record, self.recipe.steps_at_once
        batches = [self.loader.batch(record.step + i) for i in range(count)]
        left = self.options["seconds"] - record.first_seconds
        progress = (self.seconds - record.first_seconds) / left if record.step else 0.0
        begin = self.seconds
        loss = self.recipe.train(batches, factor_at(self.options["settings"], progress))
        if not math.isfinite(loss):
            raise FloatingPointError
        record.seconds = self.seconds
        if record.step:
            record.call_seconds.append(record.seconds - begin)
        else:
            record.first_seconds = record.seconds
        record.step += count
        record.tokens += count * self.recipe.sequences * self.sizes[0]


def main(recipes: Mapping[str, Callable[[Figures], Recipe]]) -> None:
    """Run what the options say, and print its figures last."""
    options = json.loads(sys.stdin.read())
    run = Run(options, recipes[options["kind"]])
    with suppress(FloatingPointError):  # that is a result, too: diverged, and without a loss
        run.whole()
    ceiling = multiply_ceiling(options["settings"]["mode"].partition("-")[2])  # beside its steps
    print(json.dumps(run.record.figures() | {"ceiling": ceiling}))
