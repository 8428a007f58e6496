"""The host's memory that one process of a run takes: the process itself, rows, and tensors."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import popdist
import popxl

from popxl_gpt.config import Config
from popxl_gpt.execution.memory import copy_bytes, processes_here, saving_bytes
from popxl_gpt.utils.process_memory import resident_bytes
from popxl_gpt.utils.runtime import planner, session_device

Build = Callable[[Config], tuple[popxl.Ir, Any, Any]]
"""Builds a configuration's program: the Ir first, what else comes is not needed."""
MADE_FOR_RUNS = 22 * 2**20
"""Bytes that a process takes from when it has loaded the engine to its first steps, beside rows and
tensors: the program, what it is compiled to, and the kernels' code. Measured with the preset tiny.
"""
LOADED_TO_PAGE = 33 * 2**20
"""What it takes more where rows come and go: how many are in use at a time is found by a dry run,
for which PyTorch loads a library of algebra.
"""
SHARED_WITH_EACH = 8 * 2**20
"""What it shares with each other process of the run here: long messages, in both directions."""
MADE_AFTER_PLAN = 6 * 2**20
"""Of these, what is not there after a plan."""


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of the host's memory that one process of a run takes."""

    itself: int
    """The interpreter, PyTorch, the program and its kernels."""
    rows: int
    """Remote rows of its replicas."""
    tensors: int
    """What its replicas have in hand beside rows; on a GPU that is in the device's memory."""
    saving: int
    """What a checkpoint is written from, in place of tensors."""
    copy: int
    """What it takes more while a checkpoint is written beside training: a copy of its part of the
    state. No more than half of the memory that is free then."""

    @property
    def resident(self) -> int:
        """What it keeps to its end: the process's resident set."""
        return self.itself + self.rows + max(self.tensors, self.saving)


def has_validation(config: Config) -> bool:
    """Whether a run looks at held-out text."""
    has_data = bool(config.data.validation_files) or config.data.is_synthetic
    return has_data and config.training.validate_every > 0


def without_files(config: Config) -> Config:
    """The same with rows in memory: no file of remote memory is made."""
    return replace(config, execution=replace(config.execution, memmap_dir=None))


def own_bytes(config: Config, has_planned: bool = False) -> int:
    """Bytes of this process by the time a run makes its first steps, beside rows and tensors.

    Args:
        has_planned: it has made a plan, and with it some of what runs need.
    """
    session_device("cpu")  # loads the engine; a GPU that is planned for need not be there
    shared = (processes_here() - 1) * SHARED_WITH_EACH
    if has_planned:
        return resident_bytes() + MADE_AFTER_PLAN + shared
    execution = config.execution
    is_paged = execution.host_memory is not None or execution.device_memory is not None
    return resident_bytes() + MADE_FOR_RUNS + is_paged * LOADED_TO_PAGE + shared


def process_memory(
    config: Config, itself: int, training: popxl.Ir, validation: Build | None
) -> ProcessMemory:
    """What a process of a run takes.

    Args:
        itself: `own_bytes`, from before the session was made.
        training: the training program.
        validation: builds the program that runs between steps; none: nothing does.
    """
    host_needs, execution = planner().host_needs, config.execution
    needs = host_needs(training)
    rows, tensors, all_rows = needs.rows, needs.tensors, needs.all_rows
    if validation is not None and has_validation(config):
        between = host_needs(validation(without_files(config))[0])
        rows, all_rows = rows + between.all_rows, all_rows + between.all_rows
        tensors = max(tensors, between.tensors)
    if execution.memmap_dir is not None and execution.host_memory is not None:
        rows = min(all_rows, execution.host_memory)
    on_host = 0 if execution.device.startswith("cuda") else tensors
    saving = saving_bytes(config)
    copy = copy_bytes(config, popdist.getNumInstances())
    return ProcessMemory(itself, rows, on_host, saving, copy)
