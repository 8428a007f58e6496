"""The files of a run's folder: what is there, as plain values; what is not, or is damaged, is
left out.
"""

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from popxl_gpt.config.command_line import RUN_CONFIG, RUN_METRICS
from popxl_gpt.config.saving import load
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.checkpoints.checkpoint_folder import MANIFEST, best_in, checkpoints_in
from popxl_gpt.execution.checkpoints.manifest import ManifestError, read_manifest
from popxl_gpt.execution.reports.run.curves import Curves
from popxl_gpt.execution.reports.run.heat_maps import STEPS
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.files.bounded import parse_json, read_bounded
from popxl_gpt.utils.files.plain import open_plain, real_path

ABOUT = "run.json"
"""What a run was when it last started: program, data, machine."""
SAMPLES = "samples.jsonl"
NORMS = "norms.jsonl"
PROFILE, PLAN = "profile.json", "plan.json"
WARNINGS = "warnings.jsonl"
REPORT = "report.html"
LARGEST_FILE = 2**24
"""Bytes of a file that is read whole; of samples and warnings, so many at their end."""
LONGEST_LINE = 2**20
"""Bytes of a line of norms; one of a thousand layers has fewer."""
SHOWN = 30
"""Samples or warnings that are shown, the newest."""


@dataclass(frozen=True)
class Checkpoint:
    """One that a run's folder has."""

    name: str
    size: int
    """Bytes of its files."""
    validation_loss: float | None
    is_best: bool


@dataclass(frozen=True)
class Sample:
    """What the model wrote."""

    values: "dict[str, Any]"
    number: int
    of: int
    """Its number among those of its step, from 1, and how many these are."""


@dataclass
class RunFiles:
    """What a run's folder says. `update` reads again what changes while the run trains."""

    folder: Path
    config: Config
    curves: Curves
    about: "dict[str, Any]" = field(default_factory=dict)
    profile: "dict[str, Any]" = field(default_factory=dict)
    plan: "dict[str, Any]" = field(default_factory=dict)
    samples: "list[Sample]" = field(default_factory=list)
    norms: "list[dict[str, Any]]" = field(default_factory=list)
    warnings: "list[dict[str, Any]]" = field(default_factory=list)
    checkpoints: "list[Checkpoint]" = field(default_factory=list)
    too_large: "list[str]" = field(default_factory=list)
    """Files that are not read, for they have too many bytes."""

    @property
    def name(self) -> str:
        """The folder's name: that of the run, and a number where it had one already."""
        return self.folder.name

    @property
    def is_finished(self) -> bool:
        """Whether the last step is done."""
        return self.curves.last("step") >= self.config.training.steps

    def update(self) -> None:
        """Read what has come since.

        Raises:
            UserError: the metrics cannot be read.
        """
        with suppress(UserError):  # what is damaged, or gone, stays as it was read before
            self.config = load(
                self.folder / RUN_CONFIG
            )  # a run may come to know its last step late
        self.curves.update()
        self.about = _object(self.folder / ABOUT)
        self.profile = _object(self.folder / PROFILE)
        self.plan = _object(self.folder / PLAN)
        self.samples = _numbered(_last_lines(self.folder / SAMPLES))[-SHOWN:]
        self.norms = _lines_between(self.folder / NORMS)
        self.warnings = _last_lines(self.folder / WARNINGS)[-SHOWN:]
        whole = (ABOUT, PROFILE, PLAN)
        self.too_large = [name for name in whole if self._size(name) > LARGEST_FILE]
        named = self.config.checkpoint.save
        self.checkpoints = _checkpoints(Path(named) if named else self.folder / "checkpoints")

    def _size(self, name: str) -> int:
        try:
            return (self.folder / name).stat().st_size
        except OSError:
            return 0


def read_run(folder: Path) -> RunFiles:
    """A run's folder.

    Raises:
        UserError: it is none.
    """
    if not (folder / RUN_CONFIG).is_file():
        found = f"a folder without {RUN_CONFIG}" if folder.is_dir() else "no folder"
        raise UserError(
            f"{folder}: got {found}; expected one that a run has left. Name "
            "folders such as runs/demo."
        )
    files = RunFiles(real_path(folder), load(folder / RUN_CONFIG), Curves(folder / RUN_METRICS))
    files.update()
    return files


def _object(path: Path) -> "dict[str, Any]":
    try:
        found = parse_json(read_bounded(path, LARGEST_FILE))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _last_lines(path: Path) -> "list[dict[str, Any]]":
    """The objects at a file's end."""
    try:
        with open(open_plain(path), "rb") as file:
            begin = max(0, os.fstat(file.fileno()).st_size - LARGEST_FILE)
            file.seek(begin)
            lines = file.read(LARGEST_FILE).splitlines()
    except OSError:
        return []
    return _objects(lines[1 if begin else 0 :])  # the first one may be a part


def _lines_between(path: Path) -> "list[dict[str, Any]]":
    """A file's objects; of a large file those at places that are equally far from each other, as
    many as are shown.
    """
    try:
        with open(open_plain(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= LARGEST_FILE:
                return _objects(file.read(LARGEST_FILE).splitlines())
            lines = []
            for number in range(STEPS):
                file.seek(size * number // STEPS)
                if number > 0:
                    file.readline(LONGEST_LINE)  # a part
                lines.append(file.readline(LONGEST_LINE))
            return _objects(lines)
    except OSError:
        return []


def _objects(lines: "Sequence[bytes]") -> "list[dict[str, Any]]":
    """The objects of lines that have some."""
    found = []
    for line in lines:
        with suppress(ValueError):
            values = parse_json(line)
            if isinstance(values, dict):
                found.append(values)
    return found


def _numbered(lines: "Sequence[dict[str, Any]]") -> "list[Sample]":
    """The samples of some lines; those of one step are numbered."""
    of_step = Counter(str(line.get("step")) for line in lines)
    number: Counter[str] = Counter()
    found = []
    for line in lines:
        step = str(line.get("step"))
        number[step] += 1
        found.append(Sample(line, number[step], of_step[step]))
    return found


def _checkpoints(folder: Path) -> "list[Checkpoint]":
    best, found = best_in(folder), []
    for path in checkpoints_in(folder):
        try:
            size = sum(file.stat().st_size for file in path.iterdir())
            loss = read_manifest(path / MANIFEST).get("validation_loss")
        except (OSError, ManifestError):
            continue  # deleted meanwhile, or damaged: loading it says so
        found.append(Checkpoint(path.name, size, loss, path == best))
    return found
