"""The folder that a run leaves: config.yml, metrics.jsonl, loss.png, checkpoints."""

import errno
import fcntl
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Optional

from config import Config, UserError, to_yaml
from execution.checkpoint import SavedRun, checkpoints_in, find
from utils.files import written_whole

_LOG = logging.getLogger(__name__)
_locks: "dict[Path, int]" = {}
"""Descriptors of the folders that this process writes to; their locks end with the process, however
it ends.
"""


@dataclass(frozen=True)
class RunFolder:
    """Where a run's files are."""

    path: Path
    checkpoints: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yml"

    @property
    def metrics(self) -> Path:
        """One JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def picture(self) -> Path:
        """Training and validation loss."""
        return self.path / "loss.png"

    def holds(self, saved: SavedRun) -> bool:
        """Whether a checkpoint is one of this run's."""
        return saved.folder.resolve().parent == self.checkpoints.resolve()

    @contextmanager
    def prepared(self, config: Config) -> Iterator[None]:
        """Make the folder, keep other runs out of it, and write the configuration.

        It takes the place of an older one only after the block: a run that cannot start leaves what
            it would continue.

        Raises:
            UserError: the folder takes no files, or another run writes to it now.
        """
        with ExitStack() as stack:
            stack.enter_context(_unwound_by(signal.SIGTERM, signal.SIGHUP))
            stack.enter_context(_removed_where_it_fails(self.path, self.checkpoints))
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                _lock(self.path)
                partial = stack.enter_context(written_whole(self.config))
                partial.write_text(to_yaml(config), encoding="utf-8")
                for path in (self.config, self.metrics):
                    if path.is_dir():
                        raise IsADirectoryError(errno.EISDIR, f"{path.name} is a folder", str(path))
            except OSError as error:
                raise UserError(
                    f"{self.path}: got '{error.strerror}' while writing; expected a folder that "
                    "takes files. Check its permissions and the space on the disk, or choose "
                    "another --run_folder."
                ) from error
            try:
                self.checkpoints.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                flag = (
                    "--run_folder" if self.checkpoints.parent == self.path else "--checkpoint.save"
                )
                raise UserError(
                    f"{self.checkpoints}: got '{error.strerror}'; expected a folder for "
                    f"checkpoints. Check what it is and its permissions, or choose another {flag}."
                ) from error
            yield


@contextmanager
def _unwound_by(*numbers: signal.Signals) -> Iterator[None]:
    """Let signals that would end the process where it stands end the block in order, as Ctrl-C
    does.
    """
    heard = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in heard:
        signal.signal(number, _unwind)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, signal.SIG_DFL)


def _unwind(number: int, frame: Optional[FrameType]) -> None:
    sys.exit(128 + number)


@contextmanager
def _removed_where_it_fails(*paths: Path) -> Iterator[None]:
    """Remove folders that the block has made, and nothing has come into, if it fails."""
    made = [folder for path in paths for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield
    except BaseException:
        for folder in sorted(set(made), key=lambda folder: len(folder.parts), reverse=True):
            with suppress(OSError):  # something is in it, or it was not made
                folder.rmdir()
        raise


def choose_folder(config: Config) -> "tuple[RunFolder, Optional[SavedRun]]":
    """The run's folder, and the checkpoint it continues from.

    A run that starts afresh never touches an older run's files: it takes the first of `<name>`,
    `<name>-2`, .. that has none. With `--checkpoint.load auto` it continues in `<name>`; so it does
    from the newest checkpoint's path.

    Raises:
        UserError: the checkpoint cannot be used.
    """
    root, load = Path(config.logging.run_folder), config.checkpoint.load
    named = _folder(root / config.name, config)
    if load is None:
        return _unused(root, config), None
    saved = find(load, named.checkpoints, config)
    if load == "auto":
        return named, saved
    assert saved is not None
    is_newest = [path.resolve() for path in checkpoints_in(named.checkpoints)[-1:]] == [
        saved.folder.resolve()
    ]
    return (named if is_newest else _unused(root, config)), saved


def _folder(path: Path, config: Config) -> RunFolder:
    return RunFolder(
        path, Path(config.checkpoint.save) if config.checkpoint.save else path / "checkpoints"
    )


def _unused(root: Path, config: Config) -> RunFolder:
    if config.checkpoint.save and checkpoints_in(Path(config.checkpoint.save)):
        raise UserError(
            f"--checkpoint.save: got {config.checkpoint.save}, which holds checkpoints of another "
            "run; expected an empty folder. Choose another, or continue that run with "
            "--checkpoint.load auto."
        )
    number, path = 1, root / config.name
    while (
        (path / "metrics.jsonl").exists()
        or checkpoints_in(path / "checkpoints")
        or _is_locked(path)
    ):
        number += 1
        path = root / f"{config.name}-{number}"
    return _folder(path, config)


def _lock(folder: Path) -> None:
    """Take a run's folder for this process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UserError(
            f"{folder}: got a folder that another run is writing to; expected one of our own. "
            "Wait for that run to end, or choose another --name."
        ) from error
    except OSError as error:
        _LOG.warning(
            "%s: this file system has no locks (%s); start no second run here.",
            folder,
            error.strerror,
        )
    _locks[folder] = descriptor


def _is_locked(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # told when this run takes it
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # told when this run takes its folder
        return False
    finally:
        os.close(descriptor)
    return False
