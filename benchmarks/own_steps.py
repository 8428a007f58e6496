"""Steps of training beside the same steps that are recorded or saved."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import Arguments
from benchmarks.own_cases import MORE, Case, Clocks, clocked, now
from benchmarks.phased import PhasedTrainer
from popxl_gpt.config.presets import override, preset
from popxl_gpt.config.schema import Checkpoint, Config
from popxl_gpt.execution.checkpoints.saved_state import Position
from popxl_gpt.execution.checkpoints.saving import begin_save, save
from popxl_gpt.utils.runtime import profile

ALONE = {"data_parallel": 1, "tensor_parallel_1": 1, "tensor_parallel_2": 1, "warmup_steps": 0}
WIDE = {
    **{"layers": 4, "hidden_size": 768, "heads": 12, "vocabulary_size": 16384},
    **{"global_batch_size": 4, "micro_batch_size": 4, "precision": "bfloat16", "dropout": 0.1},
}
"""Layers of GPT-2 small, with few tokens in a step: updates take a large part of it."""
BETWEEN = 60 * Checkpoint().every_minutes
"""Seconds from one checkpoint to the next, by default."""


class Run(NamedTuple):
    """A training session, and where its files are."""

    trainer: PhasedTrainer
    folder: Path


def training(name: str, _: Arguments, folder: Path) -> Run:
    """The set-up of a preset, of the wide model, or of that one with its rows in files, half of
    them in memory at a time.
    """
    is_wide = name in ("wide", "files")
    config = override(preset("mini" if is_wide else name, **ALONE), **(WIDE if is_wide else {}))
    if name == "files":
        config = override(config, memmap_dir=str(folder / "rows"), host_memory="300MiB")
    run = Run(PhasedTrainer(config), folder)
    run.trainer.step(1)
    return run


def step(around: Callable[[Run], AbstractContextManager[Any]], run: Run) -> Clocks:
    """A step within a block."""
    with around(run):
        return clocked(run.trainer.step, 1)


def place(run: Run) -> tuple[Any, Config, Path, Position]:
    """What a checkpoint is made of, after another step."""
    run.trainer.step(1)
    return run.trainer.session, run.trainer.config, run.folder, Position(run.trainer.done, "")


def reading(run: Run) -> Clocks:
    """What training waits for before the next step begins."""
    where, begin = place(run), now()
    saving = begin_save(*where)
    seconds = now() - begin
    saving.finish()
    return seconds


def behind(run: Run) -> Clocks:
    """What steps take more while a checkpoint is written, reading the state included."""
    where, taken, before = place(run), 0, clocked(run.trainer.step, 3)
    begin = now()
    saving = begin_save(*where)
    while not saving.is_done:
        run.trainer.step(1)
        taken += 1
    saving.finish()
    meanwhile = now() - begin
    return meanwhile - taken * (before + clocked(run.trainer.step, 3)) / 6


def waited(run: Run) -> Clocks:
    """A checkpoint that training waits for."""
    return clocked(save, *place(run))


PLAIN = partial(step, lambda _: nullcontext())
CASES = (
    *(
        Case(
            name=f"profiling, preset {name}", ready=partial(training, name), rounds=10, warmup=2,
            timed=partial(step, lambda run: profile(run.trainer.session)), beside=PLAIN,
            compared=MORE, bar=(-np.inf, 5.0),
        )
        for name in ("tiny", "mini")
    ),
    *(
        Case(
            name=f"saving, {name}: {way}", ready=partial(training, name), rounds=5, timed=timed,
            bar=(-np.inf, 0.02 * BETWEEN if timed is behind else np.inf),
        )
        for name in ("mini", "wide", "files")
        for way, timed in (
            ("before the next step", reading), ("in all", behind), ("waited for", waited),
        )
    ),
)  # fmt: skip
