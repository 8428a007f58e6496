"""A profile as text: a line per phase, and the whole step."""

from typing import Any

from popxl_gpt.execution.planning.machine import origin
from popxl_gpt.execution.planning.model_size import parameter_count
from popxl_gpt.execution.planning.text import micro_batches, table
from popxl_gpt.execution.reports.profile.run_profile import RunProfile
from popxl_gpt.utils.units import bytes_text, duration, si

WORTH_TELLING = 0.01
"""Fraction of a phase's time from which a wait is shown."""
EXPLANATION = (
    "Per step, over the replicas of this process, which take turns. Limit: the larger of FLOPs "
    "and remote bytes over the speeds above;\nrows that are still in a cache may beat "
    "it.\nWaited for: shares of the phase's time in which no kernel of it ran. A CPU uses remote "
    "rows where they lie: the kernels that read them\nspend the time, and loads take none."
)
MEMORY_EXPLANATION = (
    "Most bytes at a time, of the replicas of this process together. Tensors: of the device, all "
    "but remote rows. Rows: a CPU uses them\nwhere they lie; where they come and go, all memory "
    "that is theirs. Resident: the process, at the phase's begin or its end; it\nkeeps what it "
    "frees. --plan tells of a replica on a device of its own, which has the rows in use, too."
)
HEADS = (
    "phase",
    "runs",
    "time",
    "of step",
    "speed",
    "from remote",
    "to remote",
    "limit",
    "of limit",
    "bound",
    "waited for",
)

MEMORY_HEADS = ("phase", "tensors", "planned", "rows", "planned", "resident", "planned")


def profile_text(found: RunProfile) -> str:
    """The whole profile."""
    return "\n\n".join(
        [_head(found), _phases(found), EXPLANATION, _memory(found), MEMORY_EXPLANATION]
    )


def _head(found: RunProfile) -> str:
    config, record, machine = found.config, found.record, found.machine
    speeds = (
        ("device", "device_tflops", si(machine.flops, "FLOP/s")),
        ("remote memory", "remote_gbps", si(machine.remote, "B/s")),
    )
    told = ", ".join(
        name + " " + text + origin(found.config, flag, found.measured)
        for name, flag, text in speeds
    )
    here, everywhere = len(record.replicas), config.execution.replication_factor
    replicas = f"{here} of " * (here < everywhere) + _counted(everywhere, "replica", "replicas")
    return (
        f"profile of {config.name}: {si(parameter_count(config.model))} parameters, "
        f"{config.model.precision}, {replicas}, {micro_batches(config)} per step, "
        f"{duration(found.seconds)} a step\n{told}"
    )


def _counted(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"


def _phases(found: RunProfile) -> str:
    steps, phases = found.record.steps, found.record.phases
    rows: list[tuple[str, ...]] = [HEADS]
    for phase, time in zip(phases, found.limits):
        rows.append(
            (
                phase.name,
                f"{phase.runs / steps:.4g}",
                duration(phase.seconds / steps),
                f"{phase.seconds / found.record.seconds:.1%}",
                speed(phase.work.flops, phase.seconds),
                bytes_text(phase.work.loaded_bytes / steps),
                bytes_text(phase.work.stored_bytes / steps),
                duration(time.limit / steps),
                f"{fraction(time.limit, phase.seconds):.1%}",
                time.bound if time.limit else "-",
                waits(phase),
            )
        )
    works = [phase.work for phase in phases]
    rows.append(
        (
            "step",
            "",
            duration(found.seconds),
            "",
            speed(sum(work.flops for work in works), found.record.seconds),
            bytes_text(sum(work.loaded_bytes for work in works) / steps),
            bytes_text(sum(work.stored_bytes for work in works) / steps),
            duration(found.limit),
            f"{fraction(found.limit, found.seconds):.1%}",
            "",
            "",
        )
    )
    return table(rows)


def _memory(found: RunProfile) -> str:
    rows: list[tuple[str, ...]] = [MEMORY_HEADS]
    for phase in found.record.phases:
        measured, planned = phase.memory, found.planned.get(phase.name)
        cells = [phase.name]
        for name in MEMORY_HEADS[1::2]:
            amounts = (getattr(measured, name), getattr(planned, name, None))
            cells += ["-" if amount is None else bytes_text(amount) for amount in amounts]
        rows.append(tuple(cells))
    return table(rows)


def speed(flops: float, seconds: float) -> str:
    """FLOPs in some time."""
    return si(flops / seconds, "FLOP/s") if flops and seconds else "-"


def fraction(limit: float, seconds: float) -> float:
    """How near some time comes to its limit."""
    return limit / seconds if seconds else 0.0


def waits(phase: Any) -> str:
    """What a phase waited for, the longest first."""
    found = [f"{lane} {share:.0%}" for lane, share in phase.waits.items() if share >= WORTH_TELLING]
    return ", ".join(found) or "nothing"
