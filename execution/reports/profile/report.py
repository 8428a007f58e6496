"""`--profile`: one call of the session, recorded: a timeline and a table."""

import json
import logging
import tempfile
from collections.abc import Iterator, Sequence
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
from popxl_gpt.utils.errors import UserError, reason_of
from popxl_gpt.utils.files.output_folder import written_to
from popxl_gpt.utils.files.whole import write_whole
from popxl_gpt.utils.runtime import gather, planner, profile

WARM_UP = 2
"""Runs of a session, with probes as well, before the one whose record counts: they fill caches."""
_LOG = logging.getLogger(__name__)
FLAG = "--profile_folder"
FILES = ("timeline.json", "profile.json")
"""What a profile leaves."""
PLANNED: "WeakKeyDictionary[popxl.Ir, dict[str, PhaseNeeds]]" = WeakKeyDictionary()
"""Memory by phase of programs whose runs were recorded: a plan takes seconds."""


class StepProfiler:
    """Keeps the record of one run of a training session: the third, or the last of fewer.

    Args:
        run_folder: of a run that trains: takes the files unless the options name a folder. The run
            makes it by itself, and goes on where no profile can be left.
        kept: a folder of that run which takes them, too.
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
        kept: Path | None = None,
    ):
        self.config, self.options = config, options
        self._is_training, self._kept = run_folder is not None, kept
        named = Path(options.profile_folder) if options.profile_folder else None
        self.folder = (
            named or run_folder or Path(config.logging.run_folder) / f"{config.name}-profile"
        )
        is_named = self.folder != run_folder
        self._flag = FLAG if is_named else "profile"
        if is_named and popdist.getInstanceIndex() == 0:
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
        """Let instance 0 print and write the profile; the others wait for it."""
        plain = gather(record.plain(), patiently=True)
        try:
            if popdist.getInstanceIndex() == 0:
                self._leave(session, record, [type(record).from_plain(each) for each in plain])
        except (OSError, UserError) as error:
            if not self._is_training:
                raise
            is_told = isinstance(error, UserError)
            told = str(error) if is_told else f"profile: got '{reason_of(error)}'."
            _LOG.warning("%s Training goes on without this profile.", told)
        finally:
            gather(None, patiently=True)

    def _leave(self, session: popxl.Session, record: Any, records: "Sequence[Any]") -> None:
        if session.ir not in PLANNED:
            PLANNED[session.ir] = phase_needs(self.config, session.ir, self.itself)
        found = make_run_profile(self.config, self.options, record, PLANNED[session.ir])
        print(profile_text(found))
        timeline = json.dumps(planner().timeline(records), separators=(",", ":"))
        values = json.dumps(profile_values(found), indent=2)
        folders = [self.folder]
        if self._kept is not None:
            folders = [self._kept, self.folder]
            with written_to(self._kept, self._flag):  # a run's folder that is gone stays so
                self._kept.parent.mkdir(exist_ok=True)
                self._kept.mkdir(exist_ok=True)
        for folder in folders:
            with written_to(folder, self._flag):
                for name, content in zip(FILES, (timeline, values)):
                    write_whole(folder / name, content + "\n")
        print(
            f"\nwritten to {folders[0]}: timeline.json, profile.json; open the timeline at "
            "ui.perfetto.dev\n",
            flush=True,
        )


def step_profiler(
    config: Config, options: PlanOptions, run_folder: Path | None = None
) -> StepProfiler | None:
    """A profiler where the options ask for one."""
    return StepProfiler(config, options, run_folder) if options.profile else None
