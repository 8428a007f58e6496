"""The host's memory that one process of a run takes: the process itself, rows, and tensors."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import popdist
import popxl

from popxl_gpt.config.schema import Config, Execution
from popxl_gpt.execution.instances import processes_here
from popxl_gpt.execution.planning.memory import copy_bytes, saving_bytes
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
    mapped: int = 0
    """Of the rows, what mapped files hold: the system drops it when memory is short."""

    @property
    def resident(self) -> int:
        """What it keeps to its end: the process's resident set."""
        return self.itself + self.rows + max(self.tensors, self.saving)

    @property
    def needed(self) -> int:
        """Of these, what it cannot do without."""
        return self.resident - self.mapped


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
    return _own_bytes(MADE_AFTER_PLAN) if has_planned else unpaged_bytes() + paging_bytes(config)


def unpaged_bytes() -> int:
    """Of these, what it takes where no rows come and go, and no plan was made."""
    return _own_bytes(MADE_FOR_RUNS)


def _own_bytes(made: int) -> int:
    session_device("cpu")  # loads the engine; a GPU that is planned for need not be there
    return resident_bytes() + made + (processes_here() - 1) * SHARED_WITH_EACH


def paging_bytes(config: Config) -> int:
    """What a process takes more, beside them, where rows come and go."""
    execution = config.execution
    is_paged = execution.host_memory is not None or execution.device_memory is not None
    return is_paged * LOADED_TO_PAGE


def programs_of(config: Config, training: popxl.Ir, validation: Build | None) -> list[popxl.Ir]:
    """The programs whose rows a process holds: training, and what runs between its steps."""
    if validation is None or not has_validation(config):
        return [training]
    return [training, validation(without_files(config))[0]]


def process_memory(
    config: Config, itself: int, training: popxl.Ir, validation: Build | None
) -> ProcessMemory:
    """What a process of a run takes.

    Args:
        itself: `own_bytes`, from before the session was made.
        training: the training program.
        validation: builds the program that runs between steps; none: nothing does.
    """
    programs = programs_of(config, training, validation)
    mapped = 0
    with ExitStack() as stack:
        for ir in programs:
            stack.enter_context(planner().compiled_once(ir))
        rows, tensors = _rows_and_tensors(config, programs, mapped=False)
        if _maps_files(config.execution):
            kept, beside = _rows_and_tensors(config, programs, mapped=True)
            mapped, tensors = max(0, rows - kept), max(tensors, beside)
    on_host = 0 if config.execution.device.startswith("cuda") else tensors
    saving = saving_bytes(config)
    copy = copy_bytes(config, popdist.getNumInstances())
    return ProcessMemory(itself, rows, on_host, saving, copy, mapped)


def _maps_files(execution: Execution) -> bool:
    """Whether files are mapped into memory, and rows used where they are."""
    comes_and_goes = execution.host_memory is not None or execution.device_memory is not None
    is_on_gpu = execution.device.startswith("cuda")
    return execution.memmap_dir is not None and not comes_and_goes and not is_on_gpu


def _rows_and_tensors(
    config: Config, programs: Sequence[popxl.Ir], mapped: bool
) -> tuple[int, int]:
    """Bytes of rows in the host's memory, and of tensors, while the first program runs, with rows
    of the others.

    Args:
        mapped: leave out rows that mapped files hold.
    """
    execution, needs = config.execution, [planner().host_needs(ir, mapped) for ir in programs]
    all_rows, tensors = sum(n.all_rows for n in needs), max(n.tensors for n in needs)
    rows = needs[0].rows + sum(n.all_rows for n in needs[1:])
    if execution.memmap_dir is not None and execution.host_memory is not None:
        rows = min(all_rows, execution.host_memory)
    elif execution.device.startswith("cuda"):
        rows = all_rows
    elif isinstance(execution.device_memory, int):  # a processor that stands for a device
        on_device = max(0, execution.device_memory - tensors)
        rows = all_rows + (on_device if on_device < all_rows else 0)
    return rows, tensors
