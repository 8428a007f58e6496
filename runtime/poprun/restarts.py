"""Starts of a run after the first: which failures they follow, and what one start tells the next.

All instances end and all start again: what they hold in memory is lost with one of them. A program
goes on from what it has saved, which it finds by the note that its last start left.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

from poprun.environment import USAGE_ERROR

RESTARTS = "POPDIST_RESTARTS"
"""Environment variable, set by `poprun`: how often the instances have been started again."""
NOTE = "POPDIST_NOTE"
"""Environment variable, set by `poprun --restarts`: a file that outlives the instances."""
DIVERGED, SPIKE = 3, 6
"""Exit codes of a program whose numbers say that it shall not go on."""
TOLD_TO_END = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGPIPE,
)
"""Signals by which somebody outside ends a program."""
FINAL_CODES = {0, USAGE_ERROR, DIVERGED, SPIKE, *(128 + number for number in TOLD_TO_END)}
"""Exit codes that the next start would end with, too, or that were asked for."""


def is_failure(code: int) -> bool:
    """Whether an exit code is one after which another start may succeed."""
    return code not in FINAL_CODES


def leave_note(content: Any) -> None:
    """Leave a small value for the next start of this instance, where poprun may make one.

    Instances of one machine share the note; instance 0's machine is the same in all starts.
    """
    if path := os.environ.get(NOTE):
        partial = Path(f"{path}.part")
        partial.write_text(json.dumps(content), encoding="utf-8")
        os.replace(partial, path)


def read_note() -> Any:
    """What the last start left; None where this is the first, or it left nothing."""
    if path := os.environ.get(NOTE):
        try:
            return json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
    return None
