"""What a run would need of memory, traffic and time, found without running it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Tuple

import popxl

from popxl_gpt.config import Config
from popxl_gpt.execution.model_size import flops_per_step
from popxl_gpt.execution.reports.machine import speeds
from popxl_gpt.execution.reports.options import PlanOptions
from popxl_gpt.utils.runtime import planner

Build = Callable[[Config], Tuple[popxl.Ir, Any, Any]]
"""Builds a configuration's program: the Ir first, what else comes is not needed."""


@dataclass(frozen=True)
class RunPlan:
    """A plan with its times."""

    config: Config
    program: Any
    """The runtime's plan of a run on one replica."""
    machine: Any
    """Speeds."""
    measured: Tuple[str, ...]
    """Those speeds, by flag, that were measured on this machine."""
    times: Tuple[Any, ...]
    """Of each phase in a run."""

    @property
    def seconds(self) -> float:
        """Of one step."""
        return sum(time.seconds for time in self.times) / self.program.steps

    @property
    def limit(self) -> float:
        """Of one step at the physical limit."""
        return sum(time.limit for time in self.times) / self.program.steps

    @property
    def tokens_per_second(self) -> float:
        """Over all replicas."""
        return self.config.tokens_per_step / self.seconds

    @property
    def utilisation(self) -> float:
        """Share of the devices' speed that the model's own FLOPs use, recomputation not counted."""
        return (
            flops_per_step(self.config) / self.program.replicas / self.machine.flops / self.seconds
        )

    @property
    def bound(self) -> str:
        """What takes most of a step: compute, links or remote."""
        totals = {
            "compute": sum(t.compute for t in self.times),
            "links": sum(t.link for t in self.times),
            "remote": sum(t.remote for t in self.times),
        }
        return max(totals, key=lambda name: totals[name])


def make_run_plan(build: Build, config: Config, options: PlanOptions) -> RunPlan:
    """Build the program and plan it. Files of remote memory are not made."""
    machine, measured = speeds(config, options)
    return plan_for(build, config, machine, measured)


def plan_for(build: Build, config: Config, machine: Any, measured: Tuple[str, ...]) -> RunPlan:
    """`make_run_plan` for a machine that is known.

    Args:
        measured: the flags of those speeds that were measured.
    """
    tools = planner()
    ir = build(replace(config, execution=replace(config.execution, memmap_dir=None)))[0]
    program = tools.plan(ir, device="cuda" if config.execution.device.startswith("cuda") else "cpu")
    times = tuple(tools.phase_time(phase, machine) for phase in program.phases)
    return RunPlan(config, program, machine, measured, times)
