"""The folder that a run leaves: config.yml, metrics.jsonl, loss.png, checkpoints."""

import errno
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from config import Config, UserError, to_yaml
from demo.folder_lock import FolderLock
from execution.checkpoint import SavedRun, find
from execution.checkpoint_folder import checkpoints_in
from utils.files import written_whole


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
        """Write the configuration.

        It takes the place of an older one only after the block: a run that cannot start leaves what
            it would continue.

        Raises:
            UserError: the folder takes no files.
        """
        with ExitStack() as stack:
            try:
                partial = stack.enter_context(written_whole(self.config))
                partial.write_text(to_yaml(config), encoding="utf-8")
                for path in (self.config, self.metrics):
                    if path.is_dir():
                        raise IsADirectoryError(errno.EISDIR, f"{path.name} is a folder", str(path))
            except OSError as error:
                raise _takes_no_files(self.path, error) from error
            yield


@contextmanager
def _removed_where_it_fails(path: Path) -> Iterator[None]:
    """Remove a folder, and those above it, that the block has made, and nothing has come into, if
    it fails.
    """
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield
    except BaseException:
        for folder in made:  # the innermost first
            with suppress(OSError):  # something is in it, or it was not made
                folder.rmdir()
        raise


@contextmanager
def claimed(config: Config) -> "Iterator[tuple[RunFolder, Optional[SavedRun]]]":
    """The run's folder, which no other run writes to during the block, and the checkpoint it
    continues from.

    A run that starts afresh never touches an older run's files: it takes the first of `<name>`,
    `<name>-2`, .. that is free. With `--checkpoint.load auto` it continues in `<name>`; so it does
    from the newest checkpoint's path. Folders that are made for it go where the block fails and
    nothing has come into them.

    Raises:
        UserError: the checkpoint cannot be used, or another run writes to a folder now.
    """
    root, load = Path(config.logging.run_folder), config.checkpoint.load
    with ExitStack() as stack:
        if load is None:
            yield _claim_unused(root, config, stack), None
            return
        named = _folder(root / config.name, config)
        if load == "auto":
            _claim(named, stack)
            yield named, find(load, named.checkpoints, config)
            return
        saved = find(load, named.checkpoints, config)
        assert saved is not None
        if is_newest(saved, named):
            _claim(named, stack)
            yield named, saved
        else:
            yield _claim_unused(root, config, stack), saved


def is_newest(saved: SavedRun, folder: RunFolder) -> bool:
    """Whether a checkpoint is the last one of a run."""
    newest = checkpoints_in(folder.checkpoints)[-1:]
    return [path.resolve() for path in newest] == [saved.folder.resolve()]


def _folder(path: Path, config: Config) -> RunFolder:
    return RunFolder(
        path, Path(config.checkpoint.save) if config.checkpoint.save else path / "checkpoints"
    )


def _claim(folder: RunFolder, stack: ExitStack) -> None:
    """Take a run's folders, until the stack ends; UserError where another run has one."""
    if not _lock_run(folder, stack):
        raise UserError(
            f"{folder.path}: got a folder that another run is writing to; expected one of our "
            "own. Wait for that run to end, or choose another --name."
        )
    _lock_checkpoints(folder, stack)


def _claim_unused(root: Path, config: Config, stack: ExitStack) -> RunFolder:
    """Take the first folder of the run's name that is free, until the stack ends."""
    number, folder = 1, _folder(root / config.name, config)
    while True:
        # free now, and when we have it
        if not _is_used(folder):
            with ExitStack() as attempt:
                if _lock_run(folder, attempt) and not _is_used(folder):
                    stack.push(attempt.pop_all())
                    break
        number += 1
        folder = _folder(root / f"{config.name}-{number}", config)
    _lock_checkpoints(folder, stack)
    if checkpoints_in(folder.checkpoints):
        raise UserError(
            f"--checkpoint.save: got {folder.checkpoints}, which holds checkpoints of another "
            "run; expected an empty folder. Choose another, or continue that run with "
            "--checkpoint.load auto."
        )
    return folder


def _is_used(folder: RunFolder) -> bool:
    """Whether an older run has left something here."""
    return folder.metrics.exists() or bool(checkpoints_in(folder.path / "checkpoints"))


def _lock_run(folder: RunFolder, stack: ExitStack) -> bool:
    try:
        return _lock(folder.path, stack)
    except OSError as error:
        raise _takes_no_files(folder.path, error) from error


def _lock_checkpoints(folder: RunFolder, stack: ExitStack) -> None:
    if folder.checkpoints.resolve() == folder.path.resolve():
        return
    is_own = folder.checkpoints.parent == folder.path
    try:
        is_ours = _lock(folder.checkpoints, stack)
    except OSError as error:
        raise UserError(
            f"{folder.checkpoints}: got '{error.strerror}'; expected a folder for checkpoints. "
            "Check what it is and its permissions, or choose another "
            f"{'--run_folder' if is_own else '--checkpoint.save'}."
        ) from error
    if not is_ours:
        raise UserError(
            f"--checkpoint.save: got {folder.checkpoints}, to which another run is writing; "
            "expected a folder of our own. Wait for that run to end, or choose another."
        )


def _lock(path: Path, stack: ExitStack) -> bool:
    lock = FolderLock(path)
    stack.callback(lock.release)
    stack.enter_context(_removed_where_it_fails(path))  # before it is released
    return lock.take()


def _takes_no_files(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path}: got '{error.strerror}' while writing; expected a folder that takes files. Check "
        "its permissions and the space on the disk, or choose another --run_folder."
    )
