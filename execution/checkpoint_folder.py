"""Which checkpoints a folder has, which of them stay, and what killed runs left beside them."""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from popxl_gpt.config.plain_files import sync
from popxl_gpt.data.folders import remove_unlocked
from popxl_gpt.execution.manifest import ManifestError, is_loss, read_manifest

MANIFEST = "checkpoint.json"
TOKENIZER = "tokenizer.json"
"""The tokenizer's file beside a run's checkpoints."""
NAME = re.compile(r"step_(\d+)")


def folder_name(step: int) -> str:
    """Name of the checkpoint after a step."""
    return f"step_{step:08d}"


def checkpoints_in(folder: Path) -> "list[Path]":
    """Checkpoints of a folder, oldest first."""
    found = (
        [path for path in folder.glob("step_*") if NAME.fullmatch(path.name)]
        if folder.is_dir()
        else []
    )
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def best_in(folder: Path) -> Path | None:
    """The checkpoint with the lowest validation loss, the newest of equal ones; None where no step
    that was saved was validated.
    """
    losses = [(_validation_loss(path), path) for path in reversed(checkpoints_in(folder))]
    validated = [(loss, path) for loss, path in losses if loss is not None]
    return min(validated, key=lambda found: found[0])[1] if validated else None


def _validation_loss(checkpoint: Path) -> float | None:
    try:
        found = read_manifest(checkpoint / MANIFEST).get("validation_loss")
    except (OSError, ManifestError):
        return None  # loading it says so
    return found if is_loss(found) else None  # one of another version may have anything


def delete_old(folder: Path, keep: int) -> None:
    """Delete the checkpoints before the newest ones, but the best.

    A checkpoint is deleted under a hidden name: what carries a checkpoint's name is whole.
    """
    old = checkpoints_in(folder)[:-keep]
    best = best_in(folder) if old else None
    for path in old:
        if path != best:
            hidden = path.with_name(f".{path.name}.deleted")
            os.rename(path, hidden)
            shutil.rmtree(hidden, ignore_errors=True)
            sync(folder)


def set_aside(checkpoint: Path) -> Path:
    """Give a damaged checkpoint a name that no checkpoint has. Returns its new path."""
    number, path = 1, checkpoint.with_name(f"damaged_{checkpoint.name}")
    while path.exists():
        number += 1
        path = checkpoint.with_name(f"damaged_{checkpoint.name}-{number}")
    checkpoint.rename(path)
    return path


def remove_leftovers(folder: Path) -> None:
    """Remove what runs have left that were killed while they saved or deleted a checkpoint."""
    with suppress(OSError):  # told when something is written
        remove_unlocked(folder, ".step_*")
