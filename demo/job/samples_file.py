"""`samples.jsonl`: one JSON object per text that the model wrote while it was trained."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from popxl_gpt.utils.files.bounded import read_bounded
from popxl_gpt.utils.files.plain import append_plain
from popxl_gpt.utils.files.whole import write_whole

LARGEST = 2**28
"""Bytes of a file that is read."""
_LOG = logging.getLogger(__name__)


def keep_samples(path: Path, step: int, texts: "Sequence[tuple[str, str]]") -> None:
    """Append prompts, and what the model made of them."""
    lines = [
        json.dumps({"step": step, "prompt": prompt, "text": text}) + "\n" for prompt, text in texts
    ]
    try:
        with open(append_plain(path), "a", encoding="ascii") as file:
            file.writelines(lines)
    except OSError as error:
        _LOG.warning("%s: not written: '%s'.", path, error.strerror)


def drop_later_samples(path: Path, steps_done: int) -> None:
    """Drop what was written after more steps, by a run that was cut off."""
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
            "%s: got '%s'; texts of steps that the run comes to again stay.", path, error.strerror
        )


def _step_of(line: bytes) -> int:
    """0 of a line that no run has written: it stays."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0
    return step if type(step) is int else 0
