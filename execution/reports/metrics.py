"""The file of metrics that a run leaves."""

import contextlib
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from popxl_gpt.execution.reports.running_mean import RunningMean
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.files.plain import append_plain, open_plain
from popxl_gpt.utils.files.whole import sync, written_whole

LONGEST_LINE = 10_000
"""Characters of a line; one of a run has a few hundred."""
LONGEST_RUN = 1e10
"""Seconds, three centuries."""
_LOG = logging.getLogger(__name__)


NOT_FINITE = "not_finite"
"""Field of a line with what its nulls are: nan, inf or -inf."""


class MetricsFile:
    """`metrics.jsonl`: one JSON object per step, which other programs may read while the run writes
    it.

    A line is what the run would write again if it came to that step again, but for `seconds`: a
    resumed run's file equals that of an uninterrupted one. JSON has no numbers that are not finite:
    null stands for them, and a field `not_finite` says what they are (`{"loss": null,
    "not_finite": {"loss": "nan"}}`).
    """

    def __init__(self, path: Path, steps_done: int):
        """Open the file of a run that has done so many steps: lines of later ones, from a run cut
        off, are dropped.
        """
        self.path = path
        self.last: dict[str, Any] | None = None
        """What the file had of the last step before."""
        self.lines = 0
        """Lines that the file has."""
        self.kept_loss = RunningMean()
        """The running mean of the losses of the steps before."""
        self._steps_done, self._first = steps_done, 1
        self._lost: int | None = None
        """The last of the steps from the first line's on that the file has none of."""
        self._waiting = bytearray()
        """Lines that the disk has not taken yet, the first one perhaps in part."""
        self._is_told = False
        self._begin_with(self._kept())

    def _kept(self) -> Iterator[str]:
        """Lines of steps that were done. Notes what they are: a run may have a million."""
        before: int | None = None
        for values, line in _complete_lines(self.path):
            step = values["step"]
            if step > self._steps_done:
                break
            if before is None:
                self._first = step
            elif step > before + 1:
                self._lost = step - 1
            before, self.last, self.lines = step, values, self.lines + 1
            self.kept_loss.add(number_of(values.get("loss")))
            yield line
        if (before or 0) < self._steps_done:
            self._lost = self._steps_done

    @property
    def seconds(self) -> float:
        """Seconds of training before, as the last line says."""
        return 0.0 if self.last is None else float(self.last.get("seconds", 0.0))

    def tell_of_lost_lines(self, lines: int | None) -> None:
        """Say so where the file has other lines than when the run was saved.

        Args:
            lines: how many it had then; None where that is not known: then all from its first one
                on.
        """
        expected = max(0, self._steps_done - self._first + 1) if lines is None else lines
        if self.lines == expected:
            return
        which = "" if self._lost is None else f" and none of step {self._lost}"
        _LOG.warning(
            "%s: got %d lines up to step %d%s; expected the %d of when the run was saved. Lines "
"were lost or changed: restore the file from a copy, or go on without them.",
            self.path, self.lines, self._steps_done, which, expected,
        )  # fmt: skip

    def _begin_with(self, lines: Iterable[str]) -> None:
        try:
            with written_whole(self.path) as partial, open(partial, "w", encoding="utf-8") as file:
                file.writelines(lines)
            self._file = open(append_plain(self.path), "ab", buffering=0)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def replace_last(self, values: "dict[str, Any]") -> None:
        """Put another line in the place of the last, before any is written.

        Raises:
            UserError: the disk is full; the lines before stay.
        """
        *before, _ = (line for _, line in _complete_lines(self.path))
        self.close()
        self._begin_with([*before, _line(values)])

    def write(self, values: "dict[str, Any]") -> None:
        """Append a line; floats keep every digit. Lines that a full disk does not take wait in
        memory, and training goes on.
        """
        self._waiting += _line(values).encode()
        self.lines += 1
        self._write_waiting()

    def sync(self) -> None:
        """Bring what was written onto the disk; a file that is closed has nothing more."""
        if self._file.closed:
            return
        self._write_waiting()
        try:
            sync(self._file)
        except OSError as error:
            self._tell(error)

    def close(self) -> None:
        """Write what waits, and close the file; say so where lines are lost."""
        self._write_waiting()
        if self._waiting:
            _LOG.warning(
                "%s: the last %d lines could not be written, and are lost. Free space on the disk.",
                self.path,
                self._waiting.count(b"\n"),
            )
        with contextlib.suppress(OSError):
            self._file.close()

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
        except OSError as error:
            self._tell(error)
        else:
            self._is_told = False

    def _tell(self, error: OSError) -> None:
        """Say what keeps lines in memory, once until they are written."""
        if not self._is_told:
            self._is_told = True
            _LOG.warning(
                "%s: got '%s' while writing; expected space. Training goes on, and lines wait in "
                "memory until there is some. Free space on the disk.",
                self.path,
                error.strerror,
            )


def _line(values: "dict[str, Any]") -> str:
    odd = {
        name: str(v) for name, v in values.items() if isinstance(v, float) and not math.isfinite(v)
    }
    if odd:
        values = {**values, **dict.fromkeys(odd), NOT_FINITE: odd}
    return json.dumps(values, allow_nan=False) + "\n"


def _values(found: "dict[str, Any]") -> "dict[str, Any]":
    """What `_line` was given, of what its JSON has."""
    values = dict(found)
    odd = values.pop(NOT_FINITE, {})
    return {**values, **{name: float(text) for name, text in odd.items()}}


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path}: got '{error.strerror}' while writing; expected a folder that takes files. "
        "Check its permissions and the space on the disk, or choose another --run_folder."
    )


def read_metrics(path: Path) -> "list[dict[str, Any]]":
    """Lines of a metrics file; a last line that was cut off is left out."""
    return [values for values, _ in _complete_lines(path)]


def number_of(value: Any) -> float:
    """A field of a line as a number; nan where it is none, or larger than any float."""
    try:
        return float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        return math.nan


class MetricsReader:
    """Reads a metrics file on, while a run writes it."""

    def __init__(self, path: Path):
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self._file, self._bytes, self._step = -1, 0, -1

    def read(self) -> "tuple[bool, list[dict[str, Any]]]":
        """Whether the lines begin with the file's first, as another file may have taken its place,
        and the lines since the last call.

        Raises:
            UserError: the file cannot be read.
        """
        with _readable(self.path) as descriptor:
            if descriptor is None:
                self._forget()
                return True, []
            with open(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                if status.st_ino != self._file or status.st_size < self._bytes:
                    self._forget()
                    self._file = status.st_ino
                is_first = self._bytes == 0
                file.seek(self._bytes)
                found = []
                for content in file:
                    if not content.endswith(b"\n"):
                        break  # being written
                    self._bytes += len(content)
                    line = content.decode("utf-8", "replace")
                    values = _values_of(line)
                    if values is not None and values["step"] > self._step:
                        self._step = values["step"]
                        found.append(values)
                return is_first, found


def _complete_lines(path: Path) -> "Iterator[tuple[dict[str, Any], str]]":
    """Lines that a run may have written, with ascending steps, and what they say; what is damaged
    or something else is left out.

    Raises:
        UserError: the file cannot be read.
    """
    step = -1
    with _readable(path) as descriptor:
        if descriptor is None:
            return
        with open(descriptor, encoding="utf-8", errors="replace") as file:
            for line in file:
                values = _values_of(line)
                if values is not None and values["step"] > step:
                    step = values["step"]
                    yield values, line


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[int | None]:
    """A descriptor of the file; None where there is none."""
    try:
        try:
            descriptor = open_plain(path)
        except FileNotFoundError:
            yield None
            return
        yield descriptor
    except OSError as error:
        raise UserError(
            f"{path}: got '{error.strerror}'; expected a file of metrics that can be read. Move "
            "it away, or check its permissions."
        ) from error


def _values_of(line: str) -> "dict[str, Any] | None":
    """What a whole line of numbers says; None for any other line."""
    try:
        values = json.loads(line) if line.endswith("\n") and len(line) < LONGEST_LINE else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or type(values.get("step")) is not int:
        return None
    odd = values.get("not_finite", {})
    if not isinstance(odd, dict) or not all(
        text in ("nan", "inf", "-inf") for text in odd.values()
    ):
        return None
    # before the first step there is only a validation
    numbers = [
        values.get(name)
        for name in (() if values["step"] == 0 else ("loss", "learning_rate", "gradient_norm"))
        if name not in odd
    ]
    numbers += [values["validation_loss"]] if values.get("validation_loss") is not None else []
    is_whole = "validation_loss" in values and all(
        type(number) in (int, float) for number in numbers
    )
    seconds = values.get("seconds", 0.0)
    is_time = "seconds" not in odd and type(seconds) in (int, float)
    is_timed = is_time and 0 <= seconds <= LONGEST_RUN
    return _values(values) if is_whole and is_timed else None
