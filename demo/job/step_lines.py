"""Files of JSON objects, a line each, that belong to steps: `samples.jsonl`, `norms.jsonl`."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from popxl_gpt.utils.files.bounded import read_bounded
from popxl_gpt.utils.files.plain import append_plain
from popxl_gpt.utils.files.whole import write_whole

LARGEST = 2**28
"""Bytes of a file that is read."""
_LOG = logging.getLogger(__name__)


def append_lines(path: Path, objects: "Sequence[Mapping[str, Any]]") -> None:
    """Append objects, which have a `step`."""
    try:
        with open(append_plain(path), "a", encoding="ascii") as file:
            file.writelines(json.dumps(each) + "\n" for each in objects)
    except OSError as error:
        _LOG.warning("%s: not written: '%s'.", path, error.strerror)


def drop_later_lines(path: Path, steps_done: int, what: str) -> None:
    """Drop what was written after more steps, by a run that was cut off. ``what``: it is, in
    words.
    """
    try:
        lines = read_bounded(path, LARGEST).splitlines(keepends=True)
        # the last may have been cut off with its run
        kept = [line for line in lines if line.endswith(b"\n") and _step_of(line) <= steps_done]
        if len(kept) < len(lines):
            write_whole(path, b"".join(kept))
    except FileNotFoundError:
        return
    except OSError as error:
        _LOG.warning(
            "%s: got '%s'; %s of steps that the run comes to again stay.",
            path,
            error.strerror,
            what,
        )


def _step_of(line: bytes) -> int:
    """0 of a line that no run has written: it stays."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0
    return step if type(step) is int else 0
