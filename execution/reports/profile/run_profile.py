"""What a run of the session did, beside what the machine could have done."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from popxl_gpt.config.schema import Config
from popxl_gpt.execution.planning.machine import speeds
from popxl_gpt.execution.planning.memory import PhaseNeeds
from popxl_gpt.execution.planning.options import PlanOptions
from popxl_gpt.utils.runtime import planner


@dataclass(frozen=True)
class RunProfile:
    """What a process did in one run of its session, and what the machine could have done. Seconds
    are of one step.
    """

    config: Config
    record: Any
    """The runtime's profile of the run."""
    machine: Any
    """Speeds of the machine, which the replicas of a process share."""
    measured: tuple[str, ...]
    """The speeds, by flag, that were measured on this machine."""
    limits: tuple[Any, ...]
    """The times of each phase's work at those speeds, in the whole run."""
    planned: Mapping[str, PhaseNeeds]
    """The memory that phases were to take, by name; none where it is not planned."""

    @property
    def seconds(self) -> float:
        """The seconds of a step."""
        return self.record.seconds / self.record.steps

    @property
    def limit(self) -> float:
        """The seconds of a step, at the physical limit of every phase."""
        return sum(time.limit for time in self.limits) / self.record.steps


def make_run_profile(
    config: Config,
    options: PlanOptions,
    record: Any,
    planned: Mapping[str, PhaseNeeds] | None = None,
) -> RunProfile:
    """Set the record of a run beside the speeds that are given, or those of this machine, and
    beside the memory that is planned.
    """
    machine, measured = speeds(config, options)
    limits = tuple(planner().phase_time(phase.work, machine) for phase in record.phases)
    return RunProfile(config, record, machine, measured, limits, planned or {})
