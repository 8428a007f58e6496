"""Which checkpoint a path, or a flag, means: the newest whole one of several, or the best."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from popxl_gpt.config.schema import Config
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.checkpoint_folder import (
    MANIFEST,
    NAME,
    bests,
    checkpoints_in,
    validated_in,
)
from popxl_gpt.execution.checkpoints.damage import DamagedError, DeletedError
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.files.hub import foreign_model, hub_hint
from popxl_gpt.utils.files.plain import real_path
from popxl_gpt.utils.units import counted

_LOG = logging.getLogger(__name__)
Found = TypeVar("Found")


def find_trained(path: Path, flag: str = "--checkpoint") -> SavedRun:
    """The checkpoint that a path names: a checkpoint itself, or the newest whole one of a run's
    folder or of a folder of checkpoints. It needs no configuration but its own. Adapters are merged
    into the weights.

    Raises:
        UserError: there is none, or none can be used.
    """
    if _is_checkpoint(path):
        return SavedRun(path, None).merged()
    return _again_where_deleted(lambda: _newest_trained(path, flag)).merged()


def _newest_trained(path: Path, flag: str) -> SavedRun:
    folder = _checkpoints_of(path)
    if folder is None:
        found = "no folder" if not path.is_dir() else "a folder without checkpoints"
        problem = foreign_model(path)
        if problem is not None:
            raise UserError(f"{flag}: got {path}, {problem}")
        if (path / "config.json").is_file():
            raise UserError(
                f"{flag}: got {path}, a model of Hugging Face's; expected a checkpoint. Make one: "
                f"demo/convert.py from_hugging_face {path} OUT."
            )
        raise UserError(
            f"{flag}: got {path}, {found}; expected a run's folder, such as runs/demo, or a "
            "checkpoint, such as runs/demo/checkpoints/step_00000700. Train one first, or check "
            f"the path.{hub_hint(path) if flag == '--init_from' else ''}"
        )
    # None: a run has deleted them meanwhile
    return _newest_whole(folder, None) or _newest_trained(path, flag)


def _again_where_deleted(find: Callable[[], Found]) -> Found:
    """What is found; again where a run has deleted it meanwhile, as it does with old ones."""
    while True:
        try:
            return find()
        except DeletedError as error:
            is_link = error.folder.is_symlink()  # that leads nowhere
            if is_link or error.folder.exists():
                raise


def _is_checkpoint(path: Path) -> bool:
    """Whether a path is meant to be one, be it damaged."""
    return (path / MANIFEST).exists() or NAME.fullmatch(real_path(path).name) is not None


def _checkpoints_of(path: Path) -> Path | None:
    """The folder that has the checkpoints of a run, or is one with checkpoints."""
    return next((f for f in (path / "checkpoints", path) if checkpoints_in(f)), None)


def find(load: str, folder: Path, config: Config, checksums: bool = True) -> SavedRun | None:
    """The checkpoint that `checkpoint.load` asks for: a path, of a run's folder the newest that is
    whole; "best"; or "auto" for the newest of a folder that is whole, None where there is none at
    all. ``checksums`` is that of `SavedRun`.

    Raises:
        UserError: it cannot be used, all are damaged, or none is the best.
    """
    if load == "best":
        return _again_where_deleted(lambda: SavedRun(_best(folder), config, checksums))
    path, is_own = Path(load), load == "auto"
    others = None if _is_checkpoint(path) else _checkpoints_of(path)
    if is_own:
        others = folder
    elif others is None:
        return SavedRun(path, config, checksums)
    saved = _again_where_deleted(lambda: _newest_whole(others, config, checksums))
    if saved is not None and not is_own:
        saved.passed_over = []  # another run's stay as they are
    return saved


def _best(folder: Path) -> Path:
    """The best checkpoint of a folder."""
    validated = validated_in(folder)
    if not validated:
        raise UserError(
            f"--checkpoint.load: got best, and no checkpoint in {folder} has a validation "
            "loss; expected one. Load the newest with auto, and use --validate_every."
        )
    newest = validated[0]
    odd = [each.path.name for each in validated if each.fingerprint != newest.fingerprint]
    if odd:
        _LOG.warning(
            "%s: got %s with validation losses that were measured otherwise than that of %s; "
            "expected the same measurement. They are not compared for best.",
            folder, ", ".join(odd), newest.path.name,
        )  # fmt: skip
    return bests(validated)[0]


def _newest_whole(folder: Path, config: Config | None, checksums: bool = True) -> SavedRun | None:
    damaged: list[DamagedError] = []
    for number, path in enumerate(reversed(checkpoints := checkpoints_in(folder))):
        try:
            saved = SavedRun(path, config, checksums)
        except DamagedError as error:
            damaged.append(error)
            continue
        saved.passed_over = checkpoints[len(checkpoints) - number :]
        for found in damaged:
            _LOG.warning("%s. It is passed over for %s.", found.problem, path.name)
        return saved
    if damaged:
        problems = "; ".join(found.problem for found in damaged[:3])
        raise UserError(
            f"{folder}: got {counted(len(damaged), 'checkpoint')}, all damaged ({problems}); "
            "expected a whole one. Restore one from a copy, or start afresh without "
            "--checkpoint.load."
        )
    return None
