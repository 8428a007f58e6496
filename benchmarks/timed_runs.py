"""One training run against the clock, of `time_to_loss.py`: a process of its own, which can be
ended at any step and goes on later.

The clock begins with the process and stands still while the loss on held-out text is measured and
while a run that goes on comes back to where it was.
"""

import json
import math
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
POINTS = 12
"""Of a curve, beside its end."""
SAVE_SECONDS = 120.0
"""Of the clock between states saved on the way."""
ENDED = 3
"""Exit code of a run that was told to end, and goes on with the same call."""
STATE, RECORD = "state", "record.json"


Batch = tuple[np.ndarray, np.ndarray]
"""Ids and labels, int [sequences, S] each."""
Losses = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Nats of each label: ids and labels, int [EVALUATED, S], to float32 [EVALUATED, S]."""


class Recipe(Protocol):
    """What is trained, and how."""

    sequences: int
    """Of an optimizer step."""
    steps_at_once: int
    """Optimizer steps of a call."""

    def train(self, batches: list[Batch], factor: float) -> float:
        """Optimizer steps, with rates times a factor; returns the last loss."""

    def evaluating(self) -> AbstractContextManager[Losses]:
        """Within it, losses of the weights as they are."""

    def save(self, folder: Path, step: int) -> None:
        """Write weights and the optimizer's state into an empty folder."""

    def load(self, folder: Path) -> None:
        """Go on from there."""


class Clock:
    """Seconds of training, from the start of the process on."""

    def __init__(self, started: float):
        self._since, self._before = started, 0.0

    @property
    def seconds(self) -> float:
        """What has been counted."""
        return self._before + time.monotonic() - self._since

    def set(self, seconds: float) -> None:
        """Go on from so many seconds, now."""
        self._since, self._before = time.monotonic(), seconds

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Count nothing meanwhile."""
        seconds = self.seconds
        yield
        self.set(seconds)


@dataclass
class Record:
    """What a run has done."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_seconds: float = 0.0
    """When the first call had ended: start-up and compiling."""
    call_seconds: list[float] = field(default_factory=list)
    """Of the calls after it."""
    curve: list[Figures] = field(default_factory=list)
    """Seconds, tokens and bits per byte over a part of the held-out text."""
    bits_per_byte: float | None = None
    """Over the whole held-out text, at the end."""

    def figures(self) -> Figures:
        """What the benchmark keeps."""
        kept = asdict(self)
        calls = kept.pop("call_seconds")
        return {**kept, "call_seconds": statistics.median(calls) if calls else None}


class HeldOut:
    """Held-out text, the same bytes for every recipe: each token once.

    Args:
        share: how much of it the points of a curve are measured on.
    """

    def __init__(self, dataset: Dataset, token_bytes: np.ndarray, share: float):
        self.dataset, self.token_bytes = dataset, token_bytes
        every = np.arange(len(dataset))
        part = max(1, round(len(every) * share))
        self.part = np.sort(np.random.default_rng(0).permutation(every)[:part])
        self.whole = every

    def bits_per_byte(self, losses_of: Losses, samples: np.ndarray) -> float:
        """Bits for all tokens of samples over the bytes that they stand for."""
        nats, text = 0.0, 0
        for start in range(0, len(samples), EVALUATED):
            numbers = samples[start : start + EVALUATED]
            filled = np.concatenate([numbers, np.repeat(numbers[:1], EVALUATED - len(numbers))])
            tokens = self.dataset.read(filled)
            labels = labels_of(tokens[:, 1:])
            losses = losses_of(ids_of(tokens[:, :-1]), labels)[: len(numbers)]
            begin, end = self.dataset.counted(numbers).T[..., None]
            places = np.arange(labels.shape[1])
            is_counted = (begin <= places) & (places < end)
            nats += float(losses[is_counted].sum(dtype=np.float64))
            text += int(self.token_bytes[labels[: len(numbers)][is_counted]].sum())
        return nats / math.log(2) / text


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
            `is_probe`, which is not evaluated, `folder` for its state, `started` on the monotonic
            clock, the `points` of its curve, and the `curve_share` of the held-out text that these
            are measured on.
    """

    def __init__(self, options: Figures):
        self.options, self.folder = options, Path(options["folder"])
        self.settings, self.budget = options["settings"], options["seconds"]
        self.clock, self.record = Clock(options["started"]), Record()
        self.is_ended = False
        sequence, vocabulary = options["sequence_length"], options["vocabulary_size"]
        text = Path(options["text"])
        data = TokenDataset(str(text / "train-*.tfrecord"), sequence, vocabulary)
        self.recipe = recipe_of(options)
        seed = options["seed"]
        self.loader = BatchLoader(data, self.recipe.sequences, seed=seed, prefetch=2)
        self.sequence, self.text, self.held_out = sequence, text, None
        self._saved_at = 0.0

    def whole(self) -> bool:
        """Train until the time is over; False where the run was told to end before."""
        if (self.folder / RECORD).exists():
            self._come_back()
        while self._has_time():
            if self.is_ended:
                with self.clock.stopped():
                    self._save()
                return False
            self._advance()
            if self._is_point_due():
                with self.clock.stopped():
                    self._add_point()
            if self.clock.seconds - self._saved_at > SAVE_SECONDS:
                with self.clock.stopped():
                    self._save()
        self.record.seconds = self.clock.seconds
        if self.options["is_probe"]:
            return True
        with self.recipe.evaluating() as losses_of:
            held_out = self._held_out()
            self.record.bits_per_byte = held_out.bits_per_byte(losses_of, held_out.whole)
        return True

    def end(self, *_: object) -> None:
        """Save after this step, and end."""
        self.is_ended = True

    def _has_time(self) -> bool:
        """Whether another call is over in time, if it takes what the last ones took."""
        calls, most = self.record.call_seconds, self.options["steps"]
        if most and self.record.step >= most:
            return False
        usual = statistics.median(calls[-9:]) if calls else 0.0
        return self.clock.seconds + usual < self.budget

    def _advance(self) -> None:
        record, count = self.record, self.recipe.steps_at_once
        batches = [self.loader.batch(record.step + i) for i in range(count)]
        left = self.budget - record.first_seconds
        progress = (self.clock.seconds - record.first_seconds) / left if record.step else 0.0
        begin = self.clock.seconds
        loss = self.recipe.train(batches, factor_at(self.settings, progress))
        if not math.isfinite(loss):
            raise FloatingPointError
        record.seconds = self.clock.seconds
        if record.step:
            record.call_seconds.append(record.seconds - begin)
        else:
            record.first_seconds = record.seconds
        record.step += count
        record.tokens += count * self.recipe.sequences * self.sequence

    def _is_point_due(self) -> bool:
        points = self.options["points"]
        return int(self.clock.seconds / self.budget * points) > len(self.record.curve)

    def _add_point(self) -> None:
        held_out = self._held_out()
        with self.recipe.evaluating() as losses_of:
            found = held_out.bits_per_byte(losses_of, held_out.part)
        record = self.record
        point = {"seconds": record.seconds, "tokens": record.tokens, "bits_per_byte": found}
        record.curve.append(point)

    def _held_out(self) -> "HeldOut":
        """Opened when it is first needed: reading it is no part of training."""
        if self.held_out is None:
            sizes = self.sequence, self.options["vocabulary_size"]
            files = str(self.text / "validation-*.tfrecord")
            dataset = TokenDataset(files, *sizes, stride=self.sequence)
            text_bytes = np.array(self.options["token_bytes"])
            self.held_out = HeldOut(dataset, text_bytes, self.options["curve_share"])
        return self.held_out

    def _come_back(self) -> None:
        """Take up weights, optimizer and clock; first a step that compiles what steps need."""
        record = Record(**json.loads((self.folder / RECORD).read_text()))
        batches = [self.loader.batch(i) for i in range(self.recipe.steps_at_once)]
        self.recipe.train(batches, 0.0)
        self.recipe.load(self.folder / STATE)
        self.record, self._saved_at = record, record.seconds
        self.clock.set(record.seconds)

    def _save(self) -> None:
        new, old = self.folder / "new", self.folder / STATE
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        self.recipe.save(new, self.record.step)
        self.record.seconds = self._saved_at = self.clock.seconds
        text = json.dumps(asdict(self.record))
        (self.folder / RECORD).unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)
        new.rename(old)
        (self.folder / RECORD).write_text(text)


def recipe_of(options: Figures) -> Recipe:
    """The recipe of a run. What others need is not loaded: start-up counts."""
    if options["kind"] == "ours":
        from benchmarks.timed_ours import Ours

        return Ours(options)
    from benchmarks.timed_plain import RECIPES

    return RECIPES[options["kind"]](options)


def main() -> int:
    """Run what the options say; the result goes to their `result` file."""
    options = json.loads(sys.stdin.read())
    run = Run(options)
    signal.signal(signal.SIGTERM, run.end)
    try:
        if not run.whole():
            return ENDED
    except FloatingPointError:
        run.record.bits_per_byte = None  # that is a result, too: diverged
    ceiling = multiply_ceiling(options["settings"]["mode"].partition("-")[2])  # beside its steps
    result, part = Path(options["result"]), Path(options["result"] + ".part")
    part.write_text(json.dumps(run.record.figures() | {"ceiling": ceiling}))
    part.replace(result)
    shutil.rmtree(run.folder, ignore_errors=True)
    return 0
