"""Which checkpoints a folder has, which of them stay, and what killed runs left beside them."""

import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from popxl_gpt.execution.checkpoints.manifest import ManifestError, is_loss, read_manifest
from popxl_gpt.utils.files.folders import remove_unlocked
from popxl_gpt.utils.files.plain import NO_FILE, names_in
from popxl_gpt.utils.files.whole import remove_folder

MANIFEST = "checkpoint.json"
TOKENIZER = "tokenizer.json"
"""The tokenizer's file beside a run's checkpoints."""
NAME = re.compile(r"step_(\d+)")
_LOG = logging.getLogger(__name__)


def folder_name(step: int) -> str:
    """Name of the checkpoint after a step."""
    return f"step_{step:08d}"


def checkpoints_in(folder: Path) -> "list[Path]":
    """Checkpoints of a folder, oldest first; OSError where it cannot be read."""
    found = [folder / name for name in names_in(folder) if NAME.fullmatch(name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


@dataclass(frozen=True)
class Validated:
    """A checkpoint of a step that was validated."""

    path: Path
    loss: float
    fingerprint: Any
    """Names what the loss was measured on; None where an earlier version wrote it."""


def validated_in(
    folder: Path, unreadable: "dict[Path, OSError] | None" = None
) -> "list[Validated]":
    """Checkpoints of a folder that have a validation loss, newest first.

    Args:
        unreadable: gets those of which a disk, or a network, does not tell.

    Raises:
        OSError: the folder cannot be read, or a checkpoint, and there is no `unreadable`.
    """
    found = []
    for path in reversed(checkpoints_in(folder)):
        try:
            manifest = read_manifest(path / MANIFEST)
        except ManifestError:
            continue  # loading it says so
        except OSError as error:
            if error.errno in NO_FILE:
                continue
            if unreadable is None:
                raise
            unreadable[path] = error
            continue
        loss = manifest.get("validation_loss")
        if is_loss(loss):  # one of another version may have anything
            found.append(Validated(path, loss, manifest.get("validation_fingerprint")))
    return found


def best_in(folder: Path) -> Path | None:
    """The checkpoint with the lowest validation loss of those that were measured as the newest of
    them, the newest of equal ones; None where no step that was saved was validated.
    """
    return next(iter(bests(validated_in(folder))), None)


def bests(validated: "Sequence[Validated]") -> "list[Path]":
    """The best checkpoint of each measurement, the first one of equal ones, in the order of the
    measurements.
    """
    found: dict[str, Validated] = {}
    for each in validated:
        measured = repr(each.fingerprint)
        found[measured] = min(found.get(measured, each), each, key=lambda one: one.loss)
    return [each.path for each in found.values()]


def delete_old(folder: Path, keep: int) -> None:
    """Delete the checkpoints before the newest ones, but the best of each measurement, and those of
    which a disk does not tell whether they are.

    A checkpoint is deleted under a hidden name: what carries a checkpoint's name is whole.
    """
    unreadable: dict[Path, OSError] = {}
    try:
        old = checkpoints_in(folder)[:-keep]
        validated = validated_in(folder, unreadable) if old else []
    except OSError as error:
        old, validated, unreadable = [], [], {folder: error}
    for path, failure in unreadable.items():
        _LOG.warning(
            "%s: got '%s' while looking for the best checkpoint; expected a disk, or a network, "
            "that works. Nothing of it is deleted.",
            path,
            failure.strerror,
        )
    kept = {*unreadable, *bests(validated)}
    for path in old:
        if path not in kept and path.is_symlink():
            path.unlink()  # the checkpoint itself is another folder's
        elif path not in kept:
            remove_folder(path, f".{path.name}.deleted")


def remove_leftovers(folder: Path) -> None:
    """Remove what runs have left that were killed while they saved or deleted a checkpoint."""
    with suppress(OSError):  # told when something is written
        remove_unlocked(folder, ".step_*")
