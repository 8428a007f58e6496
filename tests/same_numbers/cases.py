"""The ways in which the model is trained, and their losses and weights."""

import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import popdist
import popxl_addons as addons

from popxl_gpt.config.presets import override
from popxl_gpt.config.schedules import learning_rate
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.saved_state import Position
from popxl_gpt.execution.checkpoints.saving import save
from popxl_gpt.execution.host import own_samples, run_steps
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.variables import read_weights, write_whole_weights
from tests import warm
from tests.integration.gpt_oracle import random_weights, small
from tests.integration.runs import batches

ROOT = Path(__file__).resolve().parents[2]
MODEL = small(
    layers=3, hidden_size=16, heads=4, sequence_length=8, max_positions=8, vocabulary_size=40,
    biases=False, global_batch_size=8, micro_batch_size=2, steps=6, learning_rate=1e-2, warmup_steps=2,
    schedule="cosine", weight_decay=0.1, max_norm=0.5,
)  # fmt: skip
"""The model and its steps; the norm is clipped in some."""
OPTIMIZERS = ("adamw", "muon")
SAVED, DEAD = 3, 4
"""Steps of a killed run that are saved, and steps after which it dies."""
SECONDS = 180
"""Limit of a run in processes of its own."""


@dataclass(frozen=True)
class Case:
    """A way to train the model."""

    name: str
    settings: "dict[str, Any]" = field(default_factory=dict)
    instances: int = 1
    """Processes."""
    goes_on: bool = False
    """From the checkpoint of a run of `KILLED` that is killed."""
    beside: str = "1 x 1 x 1"
    """The layout whose numbers are expected."""


def over(dp: int, tp1: int, tp2: int) -> "dict[str, Any]":
    """The settings of a layout. Micro-batches have two sequences, where replicas have as many."""
    grid = {"data_parallel": dp, "tensor_parallel_1": tp1, "tensor_parallel_2": tp2}
    return grid | {"micro_batch_size": min(2, MODEL.training.global_batch_size // dp)}


GRIDS = (
    *((2, 1, 1), (4, 1, 1), (8, 1, 1), (1, 2, 1), (1, 4, 1), (1, 1, 2), (1, 1, 4)),
    *((2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)),
)
FILES = {"memmap_dir": "rows", "host_memory": 2**18}
"""Rows in files, with memory for a few of them."""
FOUR_IN_FILES = over(2, 2, 1) | FILES
LAYOUTS = (
    Case("1 x 1 x 1"),
    *(Case(" x ".join(map(str, grid)), over(*grid)) for grid in GRIDS),
    Case("2 x 1 x 1, optimizer state whole", over(2, 1, 1) | {"replicated_tensor_sharding": False}),
    Case("2 x 1 x 1, device memory of 256 KiB", over(2, 1, 1) | {"device_memory": 2**18}),
    Case("1 x 1 x 1, rows in files", FILES),
    Case("2 x 2 x 2, rows in files", over(2, 2, 2) | FILES),
    Case("2 x 2 x 2, 2 processes", over(2, 2, 2), 2),
    Case("2 x 2 x 1, 4 processes, rows in files", FOUR_IN_FILES, 4),
)
"""dp x tp1 x tp2."""
BUDGETS = (
    Case("all activations kept", {"recomputation": False}),
    Case("those of one layer kept", {"activation_memory": 2**16}),
    Case("3 steps a call", {"device_iterations": 3}),
    Case("head in 4 pieces", {"head_serialisation": 4}),
    Case("attention in 2 pieces", {"attention_serialisation": 2}),
    Case("micro-batches of 4", {"micro_batch_size": 4}),
    Case("2 micro-batches at a time", {"widening": 2}),
)
KILLED = Case("killed", FOUR_IN_FILES)
KILLS = (
    Case("2 x 2 x 1, rows in files", FOUR_IN_FILES, goes_on=True, beside="2 x 2 x 1"),
    Case("1 x 1 x 1", goes_on=True),
)
"""The layouts that go on."""
TABLES = {"layouts": LAYOUTS, "budgets": BUDGETS, "kills": KILLS}


def case_of(name: str) -> Case:
    """The case of a name that `run` gives to a process."""
    return next(case for case in (KILLED, *LAYOUTS) if case.name == name)


@dataclass(frozen=True)
class Numbers:
    """What came of a run."""

    losses: np.ndarray
    """Of all its steps, float64."""
    weights: "dict[str, np.ndarray]"
    """After them."""

    def write(self, path: Path) -> None:
        np.savez(path, losses=self.losses, **self.weights)

    @classmethod
    def of(cls, path: Path) -> "Numbers":
        with np.load(path) as arrays:
            found = dict(arrays)
        return cls(found.pop("losses"), found)


def config_of(settings: "dict[str, Any]", optimizer: str, folder: Path) -> Config:
    """The model with settings; its rows are in files of the folder."""
    files = {"memmap_dir": str(folder / optimizer)} if "memmap_dir" in settings else {}
    return override(MODEL, **settings | files, optimizer=optimizer)


def started(config: Config) -> addons.TaskSession:
    """A session with the weights that every run begins with."""
    session = pretraining(config)
    write_whole_weights(session, config, random_weights(config.model).items())
    return session


def steps(session: addons.TaskSession, config: Config, numbers: range) -> "list[float]":
    """The losses of some steps."""
    data, count, losses = batches(config), config.execution.device_iterations, []
    with session:
        for first in numbers[::count]:
            some = range(first, first + count)
            words, labels = (
                np.concatenate([own_samples(samples, config) for samples in part])
                for part in zip(*(data[i] for i in some))
            )
            rates = [learning_rate(config.training, i) for i in some]
            losses += [r.loss for r in run_steps(session, config, words, labels, rates)]
    return losses


def numbers_of(case: Case, optimizer: str, folder: Path) -> Numbers:
    """What comes of a case in this process, or in its instances together."""
    config, first = config_of(case.settings, optimizer, folder), 0
    if case.goes_on:
        session, first = pretraining(config), SAVED
        (saved,) = (folder / f"{optimizer}-saved").glob("step_*")
        SavedRun(saved, config).restore(session)
    else:
        session = started(config)
    losses = steps(session, config, range(first, config.training.steps))
    return Numbers(np.array(losses), read_weights(session, config))


def die(folder: Path) -> None:
    """Train with each optimizer, save, train on, and be killed."""
    for optimizer in OPTIMIZERS:
        config = config_of(KILLED.settings, optimizer, folder)
        session = started(config)
        steps(session, config, range(SAVED))
        save(session, config, folder / f"{optimizer}-saved", Position(SAVED, "data"))
        steps(session, config, range(SAVED, DEAD))
    os.kill(os.getpid(), signal.SIGKILL)


def run(case: Case, folder: Path) -> "dict[str, Numbers]":
    """What comes of a case by optimizer.

    Args:
        folder: for files; of cases that go on the same, else a new one.
    """
    if case.goes_on and not any(folder.iterdir()):
        assert part(KILLED, folder) == -signal.SIGKILL
    if case.instances == 1:
        return {optimizer: numbers_of(case, optimizer, folder) for optimizer in OPTIMIZERS}
    replicas = config_of(case.settings, OPTIMIZERS[0], folder).execution.replication_factor
    sizes = f"--num-replicas {replicas} --num-instances {case.instances}".split()
    assert part(case, folder, warm.launcher(), "-m", "poprun", *sizes) == 0
    return {optimizer: Numbers.of(folder / f"{optimizer}.npz") for optimizer in OPTIMIZERS}


def part(case: Case, folder: Path, *launcher: str) -> int:
    """The exit code of `be_part`, run in one process or by a launcher."""
    program = [warm.python(), "-m", "tests.same_numbers", "--case", case.name, "--folder", folder]
    environment = warm.with_children() | {"OMP_NUM_THREADS": "1"}
    words = [*launcher, *map(str, program)]
    return subprocess.run(words, cwd=ROOT, env=environment, timeout=SECONDS).returncode


def be_part(case: Case, folder: Path) -> None:
    """One of the processes of `run`: the one that dies, or an instance."""
    if case is KILLED:
        die(folder)
    for optimizer in OPTIMIZERS:
        found = numbers_of(case, optimizer, folder)
        if popdist.getInstanceIndex() == 0:
            found.write(folder / f"{optimizer}.npz")
