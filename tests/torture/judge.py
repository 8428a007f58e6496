"""Judges: a run's state is that of a run that nothing disturbs, and a run that ends early says
why.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from tests.metrics_text import metrics_of


class Broken(Exception):
    """A promise was broken; the message says which, and how."""


@dataclass(frozen=True)
class Undisturbed:
    """What a run leaves that nothing disturbs, with a checkpoint of every step."""

    folder: Path
    metrics: str
    states: "dict[str, dict[str, str]]"
    """What each checkpoint holds, by its name."""
    others: "set[str]"
    """Names of all other files and folders."""
    start: float
    """Seconds until its first step was done."""
    seconds: float
    """Seconds that it took."""


def checkpoints_of(run: Path) -> "list[Path]":
    """Folders that have a checkpoint's name, oldest first."""
    return sorted((run / "checkpoints").glob("step_*"))


def state_of(checkpoint: Path) -> "dict[str, str]":
    """Hashes of a checkpoint's tensors, and its numbers. Raises Broken where it is not whole."""
    try:
        manifest = json.loads((checkpoint / "checkpoint.json").read_text())
        hashes = {
            name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
            for name in manifest["files"]
        }
    except (OSError, ValueError, KeyError) as error:
        raise Broken(
            f"{checkpoint.name} carries a checkpoint's name and is not whole: {error!r}"
        ) from error
    return {
        **hashes,
        **{name: str(manifest.get(name)) for name in ("step", "seed", "rounding_seed")},
    }


TOLD = ("report.html", "run.json", "samples.jsonl", "warnings.jsonl")
"""Files that say how a run went: written while it trains, at its end, or if something is wrong."""


def others_in(run: Path) -> "set[str]":
    """Names of what is in a run's folder beside checkpoints and what it says of how it went."""
    names = {str(path.relative_to(run)) for path in run.rglob("*")}
    return {name for name in names if not name.startswith("checkpoints/step_") and name not in TOLD}


def check_checkpoints(run: Path, undisturbed: Undisturbed) -> "list[Path]":
    """Every folder with a checkpoint's name is whole and holds what it holds in the undisturbed
    run; that has none of step 0, which a signal before the first step saves.
    """
    found = checkpoints_of(run)
    for checkpoint in found:
        state = state_of(checkpoint)
        if state["step"] != "0" and state != undisturbed.states.get(checkpoint.name):
            raise Broken(f"{checkpoint.name} differs from that of an undisturbed run")
    return found


def check_end(run: Path, undisturbed: Undisturbed, *, is_tidy: bool = True) -> None:
    """The run has come to its end as if nothing had disturbed it; `is_tidy`: and has left nothing
    else behind.
    """
    last = max(undisturbed.states)
    if last not in [checkpoint.name for checkpoint in check_checkpoints(run, undisturbed)]:
        raise Broken(f"{last}, the last checkpoint, is missing")
    if metrics_of(run) != undisturbed.metrics:
        raise Broken("metrics.jsonl differs from that of an undisturbed run")
    left = sorted(others_in(run) - undisturbed.others)
    if is_tidy and left:
        raise Broken(f"left behind: {', '.join(left[:5])}")


def check_no_traceback(code: int, output: str) -> None:
    """No process of the run met an error that nobody had thought of."""
    if "Traceback" in output:
        told = output[output.index("Traceback") :][:1500]
        raise Broken(f"ended with a traceback (exit code {code}): {told}")


def check_words(code: int, output: str) -> None:
    """A run that ended by itself before its time says so, without a traceback."""
    check_no_traceback(code, output)
    if code < 0:
        raise Broken(f"ended by signal {-code}")
    if code != 0 and "error" not in output:
        raise Broken(f"ended with exit code {code} and said nothing")
