"""The choice of `--auto` beside every way to execute a model."""

import time
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.harness import Arguments, Flags, flag
from benchmarks.own_cases import RATIO, Case
from popxl_gpt.config.presets import preset
from popxl_gpt.execution.planning.axes import in_words, ways
from popxl_gpt.execution.planning.executing import choose
from popxl_gpt.execution.planning.trial import step_times
from popxl_gpt.execution.pretraining import pretraining, training_program

MODELS = {
    "demo": {},
    "wide": {"layers": 3, "hidden_size": 384, "heads": 6, "sequence_length": 128}
    | {"vocabulary_size": 1024},
    "deep": {"layers": 8, "hidden_size": 64, "heads": 4, "sequence_length": 64}
    | {"vocabulary_size": 512, "global_batch_size": 16, "micro_batch_size": 1},
}
"""What each has other than preset demo."""


class Choice(NamedTuple):
    """Seconds of steps."""

    chosen: float
    best: float
    predicted: float


@cache
def choice(model: str, by_processor: bool, seconds: float, rounds: int) -> Choice:
    """All ways are timed in rounds, and the fastest step of each counts: other programs only slow
    steps down.
    """
    config = preset("demo", **MODELS[model])
    clock = time.process_time if by_processor else time.perf_counter
    times: dict[str, float] = {}
    for _ in range(rounds):
        for way in ways(config, ()):
            fastest = min(step_times(pretraining, way, 1, 3, clock))
            times[in_words(way)] = min(fastest, times.get(in_words(way), fastest))
    found = choose(config, (), pretraining, training_program, seconds=seconds, clock=clock)
    best, chosen = min(times, key=times.__getitem__), in_words(found.config)
    print(f"{model}: {len(times)} ways, best {best}, chosen {chosen}", flush=True)
    return Choice(times[chosen], times[best], found.seconds)


def ready(model: str, flags: Arguments, _: Path) -> Choice:
    """The set-up of a model."""
    return choice(model, flags.processor, flags.auto_seconds, flags.rounds or 2)


FLAGS: Flags = {
    "--processor": {"action": "store_true", "help": "auto: search by processor time"},
    "--auto_seconds": flag(60.0, "auto: of the search"),
}
CASES = tuple(
    case
    for model in MODELS
    for case in (
        Case(
            name=f"auto, {model}: chosen beside the best", ready=partial(ready, model), rounds=1,
            timed=lambda found: found.chosen, beside=lambda found: found.best,
            compared=RATIO, bar=(-np.inf, 1.05),
        ),
        Case(
            name=f"auto, {model}: prediction beside it", ready=partial(ready, model), rounds=1,
            timed=lambda found: found.predicted, beside=lambda found: found.chosen, compared=RATIO,
        ),
    )
)  # fmt: skip
