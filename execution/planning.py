"""`--plan`: what a run would need of memory, traffic and time, found without running it."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Optional, Tuple

import popdist
import popxl

from config import Config, ConfigError, UserError
from config.schema import PathText, Positive
from execution.metrics import flops_per_step
from execution.plan_picture import draw_plan
from execution.plan_tables import plan_text
from utils.runtime import data_type, planner

Build = Callable[[Config], Tuple[popxl.Ir, Any, Any]]
"""Builds a configuration's program: the Ir first, what else comes is not needed."""
SPEEDS = {
    "device_tflops": ("flops", 1e12),
    "link_gbps": ("link", 1e9),
    "remote_gbps": ("remote", 1e9),
}
"""For each flag, the machine's speed that it gives, and its unit in FLOP/s or bytes/s."""
USED_BY = {
    "plan_folder": ("plan",),
    "profile_folder": ("profile",),
    "device_tflops": ("plan", "profile"),
    "link_gbps": ("plan",),
    "remote_gbps": ("plan", "profile"),
}
"""For each flag, the flags that make use of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What a plan or a profile is made for. Speeds that are not given are measured on this
    machine.
    """

    plan: bool = False
    """Print what the run would need of memory, traffic and time, and stop; nothing of the model's
    size is allocated.
    """
    plan_folder: Optional[PathText] = None
    """Folder for plan.json and plan.png; none: the run's folder."""
    profile: bool = False
    """Record one call of the session: a table, profile.json, profile.png, and timeline.json for
    ui.perfetto.dev or chrome://tracing.
    """
    profile_folder: Optional[PathText] = None
    """Folder for the files of a profile; none: the run's folder."""
    device_tflops: Optional[Positive] = None
    """Speed of one device on matrix products, in 1e12 FLOP/s; none: measured here."""
    link_gbps: Optional[Positive] = None
    """What one device can send to the others, in 1e9 bytes/s (gigabytes, not gigabits); none:
    measured here.
    """
    remote_gbps: Optional[Positive] = None
    """Between one device and its remote memory, both ways together, in 1e9 bytes/s; none: measured
    here.
    """

    def is_plan(self) -> bool:
        """Whether a plan is asked for.

        Raises:
            ConfigError: flags that nothing makes use of, or a plan and a profile at once.
        """
        problems = []
        for name, users in USED_BY.items():
            if getattr(self, name) is not None and not any(getattr(self, user) for user in users):
                flags = " or ".join(f"--{user}" for user in users)
                problems.append(
                    f"--{name}: got a value without {flags}; expected both or none. Add "
                    f"--{users[0]}."
                )
        if self.plan and self.profile:
            problems.append(
                "--profile: got it with --plan, which runs nothing; expected one of them. "
                "Choose one."
            )
        if problems:
            raise ConfigError(problems)
        return self.plan


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
    tools = planner()
    ir = build(replace(config, execution=replace(config.execution, memmap_dir=None)))[0]
    program = tools.plan(ir, device="cuda" if config.execution.device.startswith("cuda") else "cpu")
    machine, measured = speeds(config, options)
    times = tuple(tools.phase_time(phase, machine) for phase in program.phases)
    return RunPlan(config, program, machine, measured, times)


def speeds(config: Config, options: PlanOptions) -> Tuple[Any, Tuple[str, ...]]:
    """The machine that the options describe, and the flags of those speeds that were measured on
    this one.
    """
    tools = planner()
    given = {flag: getattr(options, flag) for flag in SPEEDS}
    known = {
        name: given[flag] * unit for flag, (name, unit) in SPEEDS.items() if given[flag] is not None
    }
    measured = tuple(flag for flag, value in given.items() if value is None)
    if not measured:
        return tools.Machine(**known), measured
    return replace(tools.measure(data_type(config.model.precision)), **known), measured


def plan_and_show(build: Build, config: Config, options: PlanOptions) -> None:
    """Print a plan, and write it as JSON and as a picture. In a run of several processes the first
    one does it.
    """
    if popdist.getInstanceIndex() != 0:
        return
    folder = (
        Path(options.plan_folder)
        if options.plan_folder
        else Path(config.logging.run_folder) / config.name
    )
    with written_to(folder, "--plan_folder"):
        folder.mkdir(parents=True, exist_ok=True)
    found = make_run_plan(build, config, options)
    print(plan_text(found))
    with written_to(folder, "--plan_folder"):
        (folder / "plan.json").write_text(
            json.dumps(as_json(found), indent=2) + "\n", encoding="utf-8"
        )
        draw_plan(found, folder / "plan.png")
    print(f"\nwritten to {folder / 'plan.json'} and {folder / 'plan.png'}")


@contextmanager
def written_to(folder: Path, flag: str) -> Iterator[None]:
    """Around what makes a folder or writes to it: where it cannot, the user hears so, and which
    flag names another.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{flag}: got '{error.strerror}' while writing to {folder}; expected a folder that "
            "takes files. Check its permissions and the space on the disk, or choose another."
        ) from error


def as_json(found: RunPlan) -> "dict[str, Any]":
    """The plan as plain values, per replica unless a name says otherwise: `step` is of one step,
    `phases` of a run.
    """
    program, execution = found.program, found.config.execution
    steps = program.steps
    phases = []
    for phase, time in zip(program.phases, found.times):
        values = asdict(phase) | {"flops": phase.flops, "product_flops": phase.product_flops}
        values["remote_memory_bytes_total"] = phase.remote_memory_bytes * program.replicas
        values |= {
            "sent_bytes": phase.sent_bytes,
            "compute_seconds": time.compute,
            "link_seconds": time.link,
        }
        values |= {
            "remote_seconds": time.remote,
            "seconds": time.seconds,
            "limit_seconds": time.limit,
        }
        phases.append(values | {"bound": time.bound})
    return {
        "config": found.config.name,
        "replicas": program.replicas,
        "steps": steps,
        "layout": {
            "data_parallel": execution.data_parallel,
            "tensor_parallel_1": execution.tensor_parallel_1,
            "tensor_parallel_2": execution.tensor_parallel_2,
        },
        "parameters": found.config.model.parameters,
        "machine": asdict(found.machine) | {"measured": list(found.measured)},
        "step": {
            "seconds": found.seconds,
            "limit_seconds": found.limit,
            "fraction_of_limit": found.limit / found.seconds,
            "bound": found.bound,
            "tokens": found.config.tokens_per_step,
            "tokens_per_second": found.tokens_per_second,
            "utilisation": found.utilisation,
            "flops": sum(phase.flops for phase in program.phases) // steps,
            "remote_bytes": sum(phase.remote_bytes for phase in program.phases) // steps,
            "sent_bytes": sum(phase.sent_bytes for phase in program.phases) // steps,
        },
        "memory": {
            "device_peak_bytes": program.peak_bytes,
            "remote_bytes_per_replica": program.remote_memory_bytes,
            "remote_bytes_total": program.total_remote_memory_bytes,
            "remote_buffers": program.buffers,
        },
        "phases": phases,
    }
