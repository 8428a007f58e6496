"""`--profile`: one call of the session, recorded: a timeline and a table."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import popdist
import popxl

from popxl_gpt.config.schema import Config
from popxl_gpt.execution.planning.memory import PhaseNeeds, phase_needs
from popxl_gpt.execution.planning.options import PlanOptions
from popxl_gpt.execution.reports.profile.run_profile import make_run_profile
from popxl_gpt.execution.reports.profile.text import profile_text
from popxl_gpt.execution.reports.profile.values import profile_values
from popxl_gpt.utils.files.output_folder import written_to
from popxl_gpt.utils.files.whole import write_whole
from popxl_gpt.utils.runtime import gather, planner, profile

WARM_UP = 2
"""Runs of a session, with probes as well, before the one whose record counts: they fill caches."""
FLAG = "--profile_folder"
FILES = ("timeline.json", "profile.json")
"""What a profile leaves."""
PLANNED: "WeakKeyDictionary[popxl.Ir, dict[str, PhaseNeeds]]" = WeakKeyDictionary()
"""Memory by phase of programs whose runs were recorded: a plan takes seconds."""


class StepProfiler:
    """Keeps the record of one run of a training session: the third, or the last of fewer.

    Args:
        run_folder: takes the files unless the options name a folder; a run that has one makes it by
            itself.
        itself: bytes of the process as `own_bytes` tells, before the session; 0: not known.
    Raises:
        UserError: the folder takes no files.
    """

    def __init__(
        self,
        config: Config,
        options: PlanOptions,
        run_folder: Path | None = None,
        itself: int = 0,
    ):
        self.config, self.options = config, options
        named = Path(options.profile_folder) if options.profile_folder else None
        self.folder = (
            named or run_folder or Path(config.logging.run_folder) / f"{config.name}-profile"
        )
        if self.folder != run_folder and popdist.getInstanceIndex() == 0:
            with written_to(self.folder, FLAG):
                self.folder.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=self.folder).close()
        self._runs, self.is_done = 0, False
        self.itself = itself

    def begin_again(self, config: Config) -> None:
        """Count runs anew, of a session with another batch."""
        self.config, self._runs = config, 0

    @contextmanager
    def around(self, session: popxl.Session, is_last: bool) -> Iterator[None]:
        """A block around each run of the session. After the one whose record counts, the profile is
        printed and written.
        """
        if self.is_done:
            yield
            return
        with profile(session) as records:
            yield
        self._runs += 1
        if self._runs > WARM_UP or is_last:
            self.is_done = True
            self._show(session, records[-1])

    def _show(self, session: popxl.Session, record: Any) -> None:
        told = gather(record.plain(), patiently=True)
        if popdist.getInstanceIndex() != 0:
            return
        records = [type(record).from_plain(each) for each in told]
        if session.ir not in PLANNED:
            PLANNED[session.ir] = phase_needs(self.config, session.ir, self.itself)
        found = make_run_profile(self.config, self.options, record, PLANNED[session.ir])
        print(profile_text(found))
        timeline = json.dumps(planner().timeline(records), separators=(",", ":"))
        values = json.dumps(profile_values(found), indent=2)
        with written_to(self.folder, FLAG):
            for name, content in zip(FILES, (timeline, values)):
                write_whole(self.folder / name, content + "\n")
        print(
            f"\nwritten to {self.folder}: timeline.json, profile.json; open the timeline at "
            "ui.perfetto.dev\n",
            flush=True,
        )


def step_profiler(
    config: Config, options: PlanOptions, run_folder: Path | None = None
) -> StepProfiler | None:
    """A profiler where the options ask for one."""
    return StepProfiler(config, options, run_folder) if options.profile else None
