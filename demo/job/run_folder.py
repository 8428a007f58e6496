"""The folder that a run leaves: config.yml, metrics.jsonl, report.html, checkpoints."""

import errno
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile

from popxl_gpt.config.command_line import RUN_CONFIG, RUN_METRICS
from popxl_gpt.config.saving import to_yaml
from popxl_gpt.config.schema import Config
from popxl_gpt.data.chat_template import KEPT
from popxl_gpt.data.text_tokenizer import TextTokenizer
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.checkpoint_folder import (
    TOKENIZER,
    checkpoints_in,
    remove_leftovers,
)
from popxl_gpt.execution.checkpoints.finding import find
from popxl_gpt.execution.exchange.kept_files import keep
from popxl_gpt.execution.exchange.trained import came_with
from popxl_gpt.execution.reports.run.run_files import (
    ABOUT,
    NORMS,
    REPORT,
    SAMPLES,
    WARNINGS,
)
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.files.bounded import read_bounded
from popxl_gpt.utils.files.folder_lock import FolderLock
from popxl_gpt.utils.files.folders import partial_folder, publish
from popxl_gpt.utils.files.plain import real_path
from popxl_gpt.utils.files.whole import remove_partial, write_whole, written_whole
from popxl_gpt.utils.runtime import leave_note, read_note

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFolder:
    """The place of a run's files."""

    path: Path
    checkpoints: Path
    locks: "tuple[FolderLock, ...]" = ()
    """Locks of the folder, and of that for checkpoints where it is another one; in instance 0
    alone.
    """

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / RUN_CONFIG

    @property
    def metrics(self) -> Path:
        """One JSON object per step."""
        return self.path / RUN_METRICS

    @property
    def tokenizer(self) -> Path:
        """The tokenizer that made the training data, beside the checkpoints."""
        return self.checkpoints / TOKENIZER

    @property
    def report(self) -> Path:
        """The run as a page."""
        return self.path / REPORT

    @property
    def about(self) -> Path:
        """Program, data and machine."""
        return self.path / ABOUT

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.path / "tensorboard"

    @property
    def samples(self) -> Path:
        """One JSON object per text that the model wrote."""
        return self.path / SAMPLES

    @property
    def norms(self) -> Path:
        """One JSON object per step after which norms were measured."""
        return self.path / NORMS

    @property
    def warnings(self) -> Path:
        """One JSON object per warning."""
        return self.path / WARNINGS

    @property
    def is_lost(self) -> bool:
        """Whether it, or that for checkpoints, was deleted or renamed while the run has it."""
        return not all(lock.is_there() for lock in self.locks)

    def loss(self) -> str:
        """What to say of a folder that is lost."""
        lock = next(lock for lock in self.locks if not lock.is_there())
        place = lock.now_at()  # nobody may know
        return (
            f"{lock.path}: got a run folder that was "
            f"{'deleted' if place is None else f'renamed to {place}'} during the run; expected it "
            "to stay."
        )

    def keep_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """Write the tokenizer beside the checkpoints, where programs that use them look for it."""
        try:
            for name, content in tokenizer.files.items():
                _keep(self.tokenizer.with_name(name), content.encode())
            _keep(self.tokenizer, tokenizer.to_str().encode())
        except OSError as error:
            _LOG.warning(
                "%s: not written: '%s'. Programs that use the model need --tokenizer.",
                self.tokenizer,
                error.strerror,
            )

    def keep_beside(self, begun: Path) -> None:
        """Copy what came with the weights that the run begins with, for an export to have it."""
        target = self.checkpoints / KEPT
        try:
            source = None if target.exists() else came_with(begun)
            if source is not None:
                with partial_folder(target) as folder:
                    keep(source, folder)
                    publish(folder, target, overwrite=False)
        except (OSError, UserError) as error:
            _LOG.warning("%s: not written: '%s'. An export goes without it.", target, error)

    def holds(self, saved: SavedRun) -> bool:
        """Whether a checkpoint is one of this run's."""
        return real_path(saved.folder).parent == real_path(self.checkpoints)

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
                    if path.exists() and not path.is_file():
                        raise OSError(errno.EINVAL, f"{path.name} is no plain file", str(path))
            except OSError as error:
                raise _takes_no_files(self.path, error) from error
            yield

    def keep_config(self, config: Config) -> None:
        """Write the configuration anew, with what the run has come to know; training goes on where
        the disk does not take it.
        """
        try:
            write_whole(self.config, to_yaml(config))
        except OSError as error:
            _LOG.warning("%s: not written: '%s'.", self.config, error.strerror)


def _keep(path: Path, content: bytes) -> None:
    """Write a file that may be there already."""
    try:
        is_kept = read_bounded(path, len(content)) == content
    except OSError:  # none, or another
        is_kept = False
    if not is_kept:
        write_whole(path, content)


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
def claimed(config: Config) -> "Iterator[tuple[RunFolder, SavedRun | None]]":
    """The run's folder, which no other run writes to during the block, and the checkpoint it
    continues from.

    A run that starts afresh never touches an older run's files: it takes the first of `<name>`,
    `<name>-2`, .. that is free. With `--checkpoint.load auto` it continues in `<name>`; so it does
    from the newest checkpoint's path. A run that the launcher starts again after a failure goes on
    in the folder that it had, whatever its name. Folders that are made for it go where the block
    fails and nothing has come into them.

    Raises:
        UserError: the checkpoint cannot be used, or another run writes to a folder now.
    """
    with ExitStack() as stack:
        had = read_note()
        folder, saved = (
            _find(config, stack)
            if had is None
            else _find_again(config, RunFolder(Path(had[0]), Path(had[1])), stack)
        )
        leave_note([str(folder.path), str(folder.checkpoints)])
        yield folder, saved


def check_folders(config: Config) -> None:
    """Refuse folders, or a checkpoint, that `claimed` and `prepared` would refuse, but for a
    checkpoint's contents, which are read once. What is tried is undone.

    Raises:
        UserError: as of these.
    """
    if read_note() is not None:
        return  # the launcher starts again what has its folder
    with suppress(_Undone), ExitStack() as stack:
        if config.checkpoint.load == "auto":  # the checkpoint is looked for once
            folder = _claim(_folder(config), stack)
        else:
            folder, _ = _find(config, stack, checksums=False)
        stack.enter_context(folder.prepared(config))
        raise _Undone


class _Undone(Exception):
    """Ends what is only tried: folders that were made, and files in them, go."""


def _find(
    config: Config, stack: ExitStack, checksums: bool = True
) -> "tuple[RunFolder, SavedRun | None]":
    load, named = config.checkpoint.load, _folder(config)
    if load is None:
        return _claim_unused(config, stack), None
    if load == "auto":
        named = _claim(named, stack)
        return named, find(load, named.checkpoints, config)
    saved = find(load, named.checkpoints, config, checksums)
    is_next = saved is not None and is_newest(saved, named)
    return _claim(named, stack) if is_next else _claim_unused(config, stack), saved


def _find_again(
    config: Config, folder: RunFolder, stack: ExitStack
) -> "tuple[RunFolder, SavedRun | None]":
    """The folder that the run had before a failure, and the newest whole checkpoint there. Where it
    had saved none, it begins as it began.
    """
    folder, load = _claim(folder, stack), config.checkpoint.load
    saved = find("auto", folder.checkpoints, config)
    if saved is None and load not in (None, "auto"):
        saved = find(load, _folder(config).checkpoints, config)
    return folder, saved


@contextmanager
def for_rescue(config: Config) -> Iterator[RunFolder]:
    """A fresh folder, where a run whose own was lost saves before it ends."""
    config = replace(config, checkpoint=replace(config.checkpoint, save=None))
    with ExitStack() as stack:
        folder = _claim_unused(config, stack)
        stack.enter_context(folder.prepared(replace(config, name=folder.path.name)))
        yield folder


def is_newest(saved: SavedRun, folder: RunFolder) -> bool:
    """Whether a checkpoint is the last one of a run."""
    newest = checkpoints_in(folder.checkpoints)[-1:]
    return [real_path(path) for path in newest] == [real_path(saved.folder)]


def _folder(config: Config, number: int = 1) -> RunFolder:
    """The run's folder, or another of its name."""
    name = config.name if number == 1 else f"{config.name}-{number}"
    path, save = Path(config.logging.run_folder) / name, config.checkpoint.save
    return RunFolder(path, Path(save) if save else path / "checkpoints")


def _claim(folder: RunFolder, stack: ExitStack) -> RunFolder:
    """Take a run's folders, until the stack ends; UserError where another run has one."""
    lock = _lock_run(folder, stack)
    if lock is None:
        raise UserError(
            f"{folder.path}: got a folder that another run is writing to; expected one of our "
            "own. Wait for that run to end, or choose another --name."
        )
    return _with_checkpoints(folder, lock, stack)


def _claim_unused(config: Config, stack: ExitStack) -> RunFolder:
    """Take the first folder of the run's name that is free, until the stack ends."""
    for number in count(1):
        folder = _folder(config, number)
        # free now, and when we have it
        if not _is_used(folder):
            with ExitStack() as attempt:
                lock = _lock_run(folder, attempt)
                if lock is not None and not _is_used(folder):
                    stack.push(attempt.pop_all())
                    break
    assert lock is not None
    folder = _with_checkpoints(folder, lock, stack)
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


def _lock_run(folder: RunFolder, stack: ExitStack) -> FolderLock | None:
    """Take a run's folder, and remove what a run that was killed has left half-written. None:
    another has it.
    """
    try:
        lock = _lock(folder.path, stack)
        if lock is not None:
            for file in (folder.config, folder.metrics, folder.report, folder.about):
                remove_partial(file)
    except OSError as error:
        raise _takes_no_files(folder.path, error) from error
    return lock


def _with_checkpoints(folder: RunFolder, lock: FolderLock, stack: ExitStack) -> RunFolder:
    """The folder with its locks, once that for checkpoints is taken, too."""
    if real_path(folder.checkpoints) == real_path(folder.path):
        return replace(folder, locks=(lock,))
    try:
        other = _lock(folder.checkpoints, stack)
        if other is not None:
            with TemporaryFile(dir=folder.checkpoints):
                pass  # refused now, not when the first is saved
    except OSError as error:
        flag = "--run_folder" if folder.checkpoints.parent == folder.path else "--checkpoint.save"
        raise UserError(
            f"{folder.checkpoints}: got '{error.strerror}'; expected a folder for checkpoints. "
            f"Check what it is and its permissions, or choose another {flag}."
        ) from error
    if other is None:
        raise UserError(
            f"--checkpoint.save: got {folder.checkpoints}, to which another run is writing; "
            "expected a folder of our own. Wait for that run to end, or choose another."
        )
    remove_leftovers(folder.checkpoints)
    return replace(folder, locks=(lock, other))


def _lock(path: Path, stack: ExitStack) -> FolderLock | None:
    lock = FolderLock(path)
    stack.callback(lock.release)
    stack.enter_context(_removed_where_it_fails(path))  # before it is released
    return lock if lock.take() else None


def _takes_no_files(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path}: got '{error.strerror}' while writing; expected a folder that takes files. Check "
        "its permissions and the space on the disk, or choose another --run_folder."
    )
