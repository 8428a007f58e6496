"""`--profile`: one call of the session, recorded: a timeline, a picture and a table."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional, Tuple

import popdist
import popxl

from config import Config
from execution.planning import PlanOptions, speeds, written_to
from execution.profile_picture import draw_profile
from execution.profile_tables import profile_text
from utils.files import written_whole
from utils.runtime import gather, planner, profile

WARM_UP = 2
"""Runs of a session, with marks as well, before the one whose record counts: they fill caches."""
FLAG = "--profile_folder"


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
    measured: Tuple[str, ...]
    """Those speeds, by flag, that were measured on this machine."""
    limits: Tuple[Any, ...]
    """For each phase the times of its work at those speeds, in the whole run."""

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.record.seconds / self.record.steps

    @property
    def limit(self) -> float:
        """Of a step, at the physical limit of every phase."""
        return sum(time.limit for time in self.limits) / self.record.steps


def make_run_profile(config: Config, options: PlanOptions, record: Any) -> RunProfile:
    """Set the record of a run beside the speeds that are given, or those of this machine."""
    machine, measured = speeds(config, options)
    limits = tuple(planner().phase_time(phase.work, machine) for phase in record.phases)
    return RunProfile(config, record, machine, measured, limits)


class StepProfiler:
    """Keeps the record of one run of a training session: the third, or the last of fewer.

    Args:
        run_folder: takes the files unless the options name a folder; a run that has one makes it by
            itself.
    Raises:
        UserError: the folder takes no files.
    """

    def __init__(self, config: Config, options: PlanOptions, run_folder: Optional[Path] = None):
        self.config, self.options = config, options
        named = Path(options.profile_folder) if options.profile_folder else None
        self.folder = named or run_folder or Path(config.logging.run_folder) / config.name
        if self.folder != run_folder and popdist.getInstanceIndex() == 0:
            with written_to(self.folder, FLAG):
                self.folder.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=self.folder).close()
        self._runs, self._is_done = 0, False

    @contextmanager
    def around(self, session: popxl.Session, is_last: bool) -> Iterator[None]:
        """Around each run of the session. After the one whose record counts, that is printed and
        written.
        """
        if self._is_done:
            yield
            return
        with profile(session) as records:
            yield
        self._runs += 1
        if self._runs > WARM_UP or is_last:
            self._is_done = True
            self._show(records[-1])

    def _show(self, record: Any) -> None:
        told = gather(record.plain(), popdist.getNumInstances(), patiently=True)
        if popdist.getInstanceIndex() != 0:
            return
        records = [type(record).from_plain(each) for each in told]
        found = make_run_profile(self.config, self.options, record)
        print(profile_text(found))
        with written_to(self.folder, FLAG):
            _write(
                self.folder / "timeline.json",
                json.dumps(planner().timeline(records), separators=(",", ":")),
            )
            _write(self.folder / "profile.json", json.dumps(as_json(found), indent=2))
            draw_profile(found, self.folder / "profile.png")
        names = ("timeline.json", "profile.json", "profile.png")
        print(
            f"\nwritten to {self.folder}: {', '.join(names)}; open the timeline at "
            "ui.perfetto.dev\n",
            flush=True,
        )


def step_profiler(
    config: Config, options: PlanOptions, run_folder: Optional[Path] = None
) -> Optional[StepProfiler]:
    """A profiler where the options ask for one."""
    return StepProfiler(config, options, run_folder) if options.profile else None


def _write(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    with written_whole(path) as partial:
        partial.write_text(text + "\n", encoding="utf-8")


def as_json(found: RunProfile) -> "dict[str, Any]":
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
