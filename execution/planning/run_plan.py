"""What a run would need of memory, traffic and time, found without running it."""

from dataclasses import dataclass
from typing import Any

import popxl

from popxl_gpt.config.inference import Inference
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.planning.machine import speeds
from popxl_gpt.execution.planning.memory import (
    Build,
    ProcessMemory,
    device_bytes,
    kind_of_device,
    own_bytes,
    process_memory,
    programs_of,
)
from popxl_gpt.execution.planning.model_size import flops_per_step
from popxl_gpt.execution.planning.options import PlanOptions
from popxl_gpt.utils.runtime import planner


@dataclass(frozen=True)
class StepPlan:
    """A plan of a training program with its times."""

    config: Config
    program: Any
    """The runtime's plan of a run on one replica."""
    machine: Any
    """Speeds."""
    measured: tuple[str, ...]
    """Flags of the speeds that were measured on this machine."""
    times: tuple[Any, ...]
    """Times of each phase in a run."""
    device_bytes: int
    """What a replica takes of its device, where that is limited, and found with peaks; else 0."""

    @property
    def seconds(self) -> float:
        """Seconds of one step."""
        return sum(time.seconds for time in self.times) / self.program.steps

    @property
    def limit(self) -> float:
        """Seconds of one step at the physical limit."""
        return sum(time.limit for time in self.times) / self.program.steps

    @property
    def exposed(self) -> float:
        """Seconds of one step in which links send and nothing is computed."""
        return sum(time.exposed for time in self.times) / self.program.steps

    @property
    def compute(self) -> float:
        """Seconds of one step in which the device computes."""
        return sum(time.compute for time in self.times) / self.program.steps

    @property
    def link(self) -> float:
        """Seconds of one step in which links send."""
        return sum(time.link for time in self.times) / self.program.steps

    @property
    def remote(self) -> float:
        """Seconds of one step in which rows come and go."""
        return sum(time.remote for time in self.times) / self.program.steps

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all replicas."""
        return self.config.tokens_per_step / self.seconds

    @property
    def utilisation(self) -> float:
        """Share of the devices' speed that the model's own FLOPs use, recomputation not counted."""
        return (
            flops_per_step(self.config) / self.program.replicas / self.machine.flops / self.seconds
        )

    @property
    def bound(self) -> str:
        """What most of a step is made of: compute, links or remote."""
        totals = dict.fromkeys(("compute", "links", "remote"), 0.0)
        for time in self.times:
            for name, seconds in time.parts.items():
                totals[name] += seconds
        return max(totals, key=lambda name: totals[name])


@dataclass(frozen=True)
class RunPlan(StepPlan):
    """A plan with its times, and with what a run of it takes here."""

    process: ProcessMemory
    """Memory of the host, as this process would take it."""
    validation: Any = None
    """The runtime's plan of validation, where that is executed in a way of its own."""


def plan_step(
    build: Build,
    config: Config,
    machine: Any,
    measured: tuple[str, ...],
    with_peaks: bool = True,
) -> StepPlan:
    """Build a training program and plan it for a machine. Files of remote memory are not made.

    Args:
        measured: the flags of those speeds that were measured.
        with_peaks: find peak memory, which takes longest; else it is 0.
    """
    (ir,) = programs_of(config, build, None)
    return _timed(config, ir, machine, measured, with_peaks)


def make_run_plan(
    build: Build, config: Config, options: PlanOptions, validation: Build | None = None
) -> RunPlan:
    """`plan_step`, and the memory of a process on this machine.

    Args:
        build: builds the training program.
        validation: builds the one that runs between steps.
    """
    itself, programs = own_bytes(), programs_of(config, build, validation)
    with planner().compiled_once(programs[0]):
        step = _timed(config, programs[0], *speeds(config, options))
        process = process_memory(config, programs, itself)
    own = None
    if len(programs) > 1 and config.inference != Inference():
        own = planner().plan(programs[1], device=kind_of_device(config.execution))
    return RunPlan(**vars(step), process=process, validation=own)


def _timed(
    config: Config,
    ir: popxl.Ir,
    machine: Any,
    measured: tuple[str, ...],
    with_peaks: bool = True,
) -> StepPlan:
    tools = planner()
    program = tools.plan(ir, device=kind_of_device(config.execution), with_peaks=with_peaks)
    times = tuple(tools.phase_time(phase, machine) for phase in program.phases)
    is_limited = with_peaks and config.execution.device_memory is not None
    on_device = device_bytes(config, ir) if is_limited else 0
    return StepPlan(config, program, machine, measured, times, on_device)
