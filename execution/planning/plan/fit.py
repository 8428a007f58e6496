"""Whether the processes of a run fit the memory that is left to them, by its plan, told before they
take it.
"""

import popdist

from popxl_gpt.config.schema import Config
from popxl_gpt.execution.instances import processes_here
from popxl_gpt.execution.planning.memory import state_bytes, too_little
from popxl_gpt.execution.planning.plan.process import (
    Build,
    ProcessMemory,
    own_bytes,
    process_memory,
    without_files,
)
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.process_memory import resident_bytes
from popxl_gpt.utils.runtime import gather, host_bytes
from popxl_gpt.utils.units import bytes_text

AMPLE = 8
"""Times `_known_bytes` with which no plan is needed. Plans of presets, with other batches and
without recomputation, come to 1.1 to 5.1 times."""
LEAST_AMPLE = 2**29
"""Bytes below which one is made for any run."""


def check_fits(
    config: Config,
    build: Build,
    validation: Build | None,
    planned: ProcessMemory | None = None,
) -> ProcessMemory | None:
    """Refuse a run whose processes here take more than is left, where the system would end them
    without a word. All processes must call it, before one has its rows. Returns what was planned,
    which takes seconds: nothing where there is ample memory.

    Args:
        build: builds the training program.
        validation: builds the program that runs between steps; none: nothing does.
        planned: what this process takes, where that is known.

    Raises:
        UserError: the processes of some machine do not fit.
    """
    instances, problem = popdist.getNumInstances(), None
    ample = max(LEAST_AMPLE, AMPLE * _known_bytes(config) // instances) * processes_here()
    if planned is None and host_bytes()[1] < ample:
        planned = process_memory(config, 0, build(without_files(config))[0], validation)
    if planned is not None:
        problem = _problem(config, planned)
    for told in gather(problem, instances, patiently=True):
        if told is not None:
            raise UserError(told)
    return planned


def _known_bytes(config: Config) -> int:
    """The state of all replicas, and the logits of a micro-batch, which may be larger."""
    model, execution = config.model, config.execution
    tokens = execution.micro_batch_size * execution.widening * model.sequence_length
    return state_bytes(config) + execution.replication_factor * tokens * model.vocabulary_size * 4


def _problem(config: Config, planned: ProcessMemory) -> str | None:
    """Why the processes here do not fit."""
    here = processes_here()
    itself = own_bytes(config, has_planned=True) - resident_bytes()
    rows = planned.rows - planned.mapped
    tensors = planned.resident - planned.itself - planned.rows
    needed = here * (itself + rows + tensors)
    if needed <= host_bytes()[1]:
        return None
    each = f" for each of {here} processes" if here > 1 else ""
    parts = f"{bytes_text(rows)} of rows and {bytes_text(itself + tensors)} of tensors{each}"
    return too_little(config, needed, parts)
