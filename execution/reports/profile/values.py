"""A profile as plain values, for JSON."""

from dataclasses import asdict
from typing import Any

from popxl_gpt.execution.reports.profile.run_profile import RunProfile


def profile_values(found: RunProfile) -> "dict[str, Any]":
    """The profile as plain values: amounts and seconds of the whole run, over the replicas of the
    first process.
    """
    record = found.record
    phases = []
    for phase, time in zip(record.phases, found.limits):
        values = {
            "name": phase.name,
            "runs": phase.runs,
            "seconds": phase.seconds,
            **asdict(phase.work),
        }
        values["seconds_by_lane"] = {lane: value / 1e9 for lane, value in phase.nanoseconds.items()}
        values["memory"] = asdict(phase.memory)
        if phase.name in found.planned:
            values["planned_memory"] = asdict(found.planned[phase.name])
        phases.append(values | {"limit_seconds": time.limit, "bound": time.bound})
    return {
        "config": found.config.name,
        "replicas": list(record.replicas),
        "steps": record.steps,
        "seconds": record.seconds,
        "limit_seconds": found.limit * record.steps,
        "machine": asdict(found.machine) | {"measured": list(found.measured)},
        "phases": phases,
    }
