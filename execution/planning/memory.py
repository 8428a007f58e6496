"""The account of memory: what a process of a run takes of the host, of a device and of disks.

Sizes follow from a configuration at once: they are the least that a run takes. What its programs
take is known by planning them, which takes seconds, and is within 5 % of runs. Plans, the search
for layouts, `--auto`, `--minutes` and the run itself ask here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import popdist
import popxl

from popxl_gpt.config.schema import Config, Execution, Model, Training
from popxl_gpt.execution.block_graphs import kept_bytes
from popxl_gpt.execution.instances import processes_here
from popxl_gpt.execution.planning.model_size import numbers_by_kind, parameter_count, trained_count
from popxl_gpt.modelling.decoder import DecoderBlock
from popxl_gpt.modelling.parameters import Role
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.process_memory import resident_bytes
from popxl_gpt.utils.runtime import gather, host_bytes, planner, session_device
from popxl_gpt.utils.units import bytes_text

Build = Callable[[Config], tuple[popxl.Ir, Any, Any]]
"""Builds a configuration's program: the Ir first, what else comes is not needed."""
WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2, "8bit": 1}
"""Bytes of a number."""
HOST_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 4, "8bit": 4}
"""Bytes of a number in an array of the host, which has no bfloat16, and in a checkpoint."""
GRADIENT = 4
"""Bytes of a parameter's gradient while a phase sums it up, float32."""
LARGEST_STATE = 2**50
"""Bytes that not even files hold."""
PROCESS = 200 * 2**20
"""Bytes that each process takes beside the state, at least, from here to its first steps: PyTorch,
the program, and a plan of it. Pages of libraries, which processes share, are not among them.
"""
MADE_FOR_RUNS = 22 * 2**20
"""Bytes that a process takes from when it has loaded the engine to its first steps, beside rows and
tensors: the program, what it is compiled to, and the kernels' code. Measured with the preset tiny.
"""
LOADED_TO_PAGE = 33 * 2**20
"""Bytes that it takes more where rows come and go: how many are in use at a time is found by a dry
run, for which PyTorch loads a library of algebra.
"""
MADE_AFTER_PLAN = 6 * 2**20
"""The part of `MADE_FOR_RUNS` that is not there after a plan."""
AMPLE = 8
"""Multiple of the state and the logits of a micro-batch, which may be larger, with which no plan is
needed. Plans of presets, with other batches and without recomputation, come to 1.1 to 5.1 times.
"""
LEAST_AMPLE = 2**29
"""Bytes below which one is made for any run."""


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
    """The part of the rows that mapped files hold: the system drops it when memory is short."""

    @property
    def resident(self) -> int:
        """The process's resident set, which it keeps to its end."""
        return self.itself + self.rows + max(self.tensors, self.saving)

    @property
    def needed(self) -> int:
        """The part of `resident` that it cannot do without."""
        return self.resident - self.mapped


@dataclass(frozen=True)
class PhaseNeeds:
    """Bytes that a phase of training takes of one process, over its replicas, at its peak."""

    tensors: int
    """Device memory beside remote rows."""
    rows: int | None
    """Remote rows in the device's memory; None where they take what is left of a GPU."""
    resident: int | None
    """The process's resident set, the same in all phases, as it keeps what a phase frees; None
    where it is not known what it takes by itself."""


def has_validation(config: Config) -> bool:
    """Whether a run looks at held-out text."""
    has_data = bool(config.data.validation_files) or config.data.is_synthetic
    return has_data and config.training.validate_every > 0


def without_files(config: Config) -> Config:
    """The configuration with rows in memory: no file of remote memory is made."""
    return replace(config, execution=replace(config.execution, memmap_dir=None))


def state_bytes(config: Config) -> int:
    """Bytes that all replicas together hold in host memory at a time, at least: parameters, and
    what is larger of their gradients, all of which are there when the backward pass ends, and
    activations between layers, which are when it begins.
    """
    model, training = config.model, config.training
    activations = (
        model.layers
        * (training.global_batch_size // config.groups)
        * model.sequence_length
        * model.hidden_size
        * WIDTHS[model.precision]
    )
    changed = trained_count(model)
    state = _optimizer_bytes(training, WIDTHS)
    precision = WIDTHS[model.precision]
    weights = parameter_count(model) * precision
    weights += changed * (WIDTHS[config.weight_precision] - precision)
    weights += narrow_bytes(model)
    gradients = changed * WIDTHS[training.gradient_precision]
    return weights + changed * state + max(gradients, activations)


def narrow_bytes(model: Model) -> int:
    """Bytes of the weights of decoder blocks in 8 bits, where some are multiplied so."""
    if model.products == "precision":
        return 0
    table = DecoderBlock.parameters(model)
    sizes = (math.prod(p.shape) for p in table.values() if p.role is Role.WEIGHT)
    return model.layers * sum(sizes)


def bytes_by_kind(config: Config) -> "dict[str, int]":
    """Bytes of a layer of each kind in a checkpoint: weights, and what the optimizer keeps."""
    number = HOST_WIDTHS[config.weight_precision] + _optimizer_bytes(config.training, HOST_WIDTHS)
    return {kind: number * count for kind, count in numbers_by_kind(config.model).items()}


def _optimizer_bytes(training: Training, widths: Mapping[str, int]) -> int:
    """Bytes that the optimizer keeps of each parameter, at least: moments, and the average."""
    moments = 1 if training.optimizer == "muon" else 2
    average = widths["float32"] if training.average_weights else 0
    return moments * widths[training.moment_precision] + average


def least_rows(config: Config, instances: int) -> int:
    """Bytes of rows in files that each of so many processes has in memory at a time, at most: of
    two layers of the largest kind, as they come and go. Replicas that are not sharded have each
    their own.
    """
    execution = config.execution
    of_a_copy = execution.tensor_parallel_1 * execution.tensor_parallel_2
    copies = max(1, execution.replication_factor // instances // of_a_copy)
    is_sharded = execution.replicated_tensor_sharding
    return 2 * (1 if is_sharded else copies) * max(bytes_by_kind(config).values())


def saving_bytes(config: Config) -> int:
    """Bytes that are read of a state at a time while it is written: a layer, the next one, which is
    read meanwhile, and a layer as it is stored, where pieces of replicas are put together or
    numbers are decoded.
    """
    by_kind, execution = bytes_by_kind(config), config.execution
    layers = ["embedding", *["decoder"] * min(config.model.layers, 2), "head"]
    two = max(by_kind[a] + by_kind[b] for a, b in pairwise(layers))
    has_pieces = execution.tensor_parallel_1 * execution.tensor_parallel_2 > 1
    is_stored_apart = has_pieces or config.training.moment_precision == "8bit"
    return two + is_stored_apart * max(by_kind.values())


def copy_bytes(config: Config, instances: int) -> int:
    """Bytes that one of so many processes copies, at most, of a state that it writes beside
    training.
    """
    if config.execution.memmap_dir is not None:
        return 0
    by_kind = bytes_by_kind(config)
    total = sum(n * (config.model.layers if k == "decoder" else 1) for k, n in by_kind.items())
    return max(total // instances, *by_kind.values())


def activation_bytes(config: Config) -> int:
    """Bytes of activations that a replica keeps for the gradient where all blocks keep theirs, of
    a group of micro-batches.
    """
    return config.model.layers * kept_bytes(config)


def least_device_bytes(config: Config) -> int:
    """Bytes that a replica takes of its device, at least: a decoder block's gathered weights, and
    their gradients where they are trained, which a backward phase has at a time.
    """
    model, execution = config.model, config.execution
    number = WIDTHS[model.precision] + (0 if model.lora_rank else GRADIENT)
    nbytes = numbers_by_kind(model)["decoder"] * number
    return nbytes // (execution.tensor_parallel_1 * execution.tensor_parallel_2)


def device_bytes(config: Config, training: popxl.Ir) -> int:
    """Bytes that a replica takes of its device, by the program: the most that rows take, and the
    most that all else takes, though not at the same time.
    """
    needs = planner().device_needs(training, device=kind_of_device(config.execution))
    return int(needs.least)


def own_bytes(has_planned: bool = False) -> int:
    """Bytes of this process by the time a run makes its first steps, beside rows and tensors.

    Args:
        has_planned: it has made a plan, and with it some of what runs need.
    """
    session_device("cpu")  # loads the engine; a GPU that is planned for need not be there
    made = MADE_AFTER_PLAN if has_planned else MADE_FOR_RUNS
    return resident_bytes() + made


def is_paged(execution: Execution) -> bool:
    """Whether rows come and go between where they wait and where they are used."""
    return execution.host_memory is not None or execution.device_memory is not None


def kind_of_device(execution: Execution) -> str:
    """What a device is to the runtime's plans: cuda or cpu."""
    return "cuda" if execution.device.startswith("cuda") else "cpu"


def programs_of(config: Config, training: Build, validation: Build | None) -> list[popxl.Ir]:
    """The programs whose rows a process holds: training, and what runs between its steps. Files of
    remote memory are not made.
    """
    builds = [training]
    if validation is not None and has_validation(config):
        builds.append(validation)
    return [build(without_files(config))[0] for build in builds]


def file_bytes(programs: Sequence[popxl.Ir]) -> int:
    """Bytes that the processes of this machine take of disks where rows are in files."""
    rows = (
        planner().plan(ir, with_peaks=False).remote_memory_bytes * ir.instance_replication_factor
        for ir in programs
    )
    return sum(rows) * processes_here()


def process_memory(config: Config, programs: Sequence[popxl.Ir], itself: int = 0) -> ProcessMemory:
    """The host's memory that a process of a run takes, by its programs.

    Args:
        programs: those of `programs_of`.
        itself: `own_bytes`, from before the session was made.
    """
    execution, mapped = config.execution, 0
    with ExitStack() as stack:
        for ir in programs:
            stack.enter_context(planner().compiled_once(ir))
        rows, tensors = _rows_and_tensors(execution, programs, mapped=False)
        on_gpu = kind_of_device(execution) == "cuda"
        if execution.memmap_dir is not None and not is_paged(execution) and not on_gpu:
            # files are mapped into memory, and rows used where they are
            kept, beside = _rows_and_tensors(execution, programs, mapped=True)
            mapped, tensors = max(0, rows - kept), max(tensors, beside)
    return ProcessMemory(
        itself=itself + is_paged(execution) * LOADED_TO_PAGE,
        rows=rows,
        tensors=0 if on_gpu else tensors,
        saving=saving_bytes(config),
        copy=copy_bytes(config, popdist.getNumInstances()),
        mapped=mapped,
    )


def phase_needs(config: Config, training: popxl.Ir, itself: int = 0) -> dict[str, PhaseNeeds]:
    """What each phase of a training program takes of a process; by name.

    Args:
        itself: `own_bytes`, from before the session was made; 0: not known.
    """
    execution, tools = config.execution, planner()
    on_gpu = kind_of_device(execution) == "cuda"
    moves = on_gpu or is_paged(execution)
    with tools.compiled_once(training):
        needs = tools.host_needs(training, execution.memmap_dir is not None and not moves)
        phases = needs.phases
        if on_gpu:
            together = training.instance_replication_factor > 1
            program = tools.plan(training, borrows_rows=True, together=together, device="cuda")
            phases = {phase.name: (0, phase.peak_bytes) for phase in program.phases}
        process = process_memory(config, [training], itself) if moves else None
        room = _room_for_rows(config, training) if moves else None
    if room is not None:
        room = min(room, needs.all_rows)
    host = itself
    if process is not None:  # rows wait there, all of them or as many as it may have
        host = process.itself + process.rows
        phases = {name: (0, tensors) for name, (_, tensors) in phases.items()}
    most = max(rows + (0 if on_gpu else tensors) for rows, tensors in phases.values())
    resident = host + most if itself else None
    return {
        name: PhaseNeeds(tensors, room if moves else rows, resident)
        for name, (rows, tensors) in phases.items()
    }


def _room_for_rows(config: Config, training: popxl.Ir) -> int | None:
    """Bytes of the device that are for rows where they come and go; None where that is what is left
    of a GPU.
    """
    execution = config.execution
    if isinstance(execution.device_memory, int):
        kind, here = kind_of_device(execution), training.instance_replication_factor
        beside = planner().device_needs(training, device=kind).working
        return execution.device_memory - here * int(beside)
    return execution.host_memory if kind_of_device(execution) == "cpu" else None


def _rows_and_tensors(
    execution: Execution, programs: Sequence[popxl.Ir], mapped: bool
) -> tuple[int, int]:
    """Bytes of rows in the host's memory, and of tensors, while the first program runs, with rows
    of the others.

    Args:
        mapped: leave out rows that mapped files hold.
    """
    needs = [planner().host_needs(ir, mapped) for ir in programs]
    all_rows, tensors = sum(n.all_rows for n in needs), max(n.tensors for n in needs)
    rows = needs[0].rows + sum(n.all_rows for n in needs[1:])
    if execution.memmap_dir is not None and execution.host_memory is not None:
        rows = min(all_rows, execution.host_memory)
    elif kind_of_device(execution) == "cuda":
        rows = all_rows
    elif isinstance(execution.device_memory, int):  # a processor that stands for a device
        on_device = max(0, execution.device_memory - tensors)
        rows = all_rows + (on_device if on_device < all_rows else 0)
    return rows, tensors


def check_memory(config: Config, instances: int) -> None:
    """Refuse a run whose state alone, what its processes here hold of it, and the processes that
    hold it, are more than this machine's memory.

    Args:
        instances: processes of the run, on all machines.

    Raises:
        UserError: it does not fit, and no files are to hold it, or what is to be in memory of them
            does not fit.
    """
    disk, here = state_bytes(config), processes_here()
    if disk > LARGEST_STATE:
        raise UserError(
            f"memory: got {config.name} with a state of {bytes_text(disk)}; expected at most "
            f"{bytes_text(LARGEST_STATE)}, which no machine or disk has. Choose a smaller model "
            "or batch."
        )
    needed, (total, left, limited_by) = disk * here // instances, host_bytes()
    part = config.execution.host_memory
    if part is not None and part * here > total:
        share = f", over {here} processes here" if here > 1 else ""
        raise UserError(
            f"host_memory: got {bytes_text(part)}; expected at most the {bytes_text(total)} of "
            f"{limited_by}{share}. Take less, for the program needs memory beside it."
        )
    own = PROCESS * here
    if config.execution.memmap_dir is not None:
        needed = 0
    if needed + own > left:
        parts = f"{bytes_text(needed)} for the state and {bytes_text(own)} for what trains it"
        raise UserError(too_little(config, needed + own, parts))


def too_little(config: Config, needed: int, parts: str) -> str:
    """What to say where a run takes more memory than is left.

    Args:
        needed: bytes that it takes here, at least, and `parts`, what for.
    """
    total, left, limited_by = host_bytes()
    return (
        f"memory: got {bytes_text(left)} left, of the {bytes_text(total)} of {limited_by}; "
        f"expected at least {bytes_text(needed)} for {config.name}: {parts}. Choose a smaller "
        "model or micro-batch, run micro-batches in groups (--micro_batch_group), set --memmap_dir "
        "to a folder on a fast disk and --host_memory, raise that limit, or start more processes "
        "on other machines; --plan shows where the memory goes."
    )


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
    instances, execution = popdist.getNumInstances(), config.execution
    tokens = execution.micro_batch_size * execution.widening * config.model.sequence_length
    logits = execution.replication_factor * tokens * config.model.vocabulary_size * 4
    ample = AMPLE * (state_bytes(config) + logits) // instances
    if planned is None and host_bytes()[1] < max(LEAST_AMPLE, ample) * processes_here():
        planned = process_memory(config, programs_of(config, build, validation))
    problem = None if planned is None else _problem(config, planned)
    for told in gather(problem, patiently=True):
        if told is not None:
            raise UserError(told)
    return planned


def _problem(config: Config, planned: ProcessMemory) -> str | None:
    """Why the processes here do not fit."""
    here = processes_here()
    itself = own_bytes(has_planned=True) - resident_bytes()
    rows = planned.rows - planned.mapped
    tensors = planned.resident - planned.itself - planned.rows
    needed = here * (itself + rows + tensors)
    if needed <= host_bytes()[1]:
        return None
    each = f" for each of {here} processes" if here > 1 else ""
    parts = f"{bytes_text(rows)} of rows and {bytes_text(itself + tensors)} of tensors{each}"
    return too_little(config, needed, parts)
