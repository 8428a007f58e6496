"""A folder that is there whole or not at all."""

import glob
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from popxl_gpt.utils.errors import DataError, EndedError, io_failure, text_of
from popxl_gpt.utils.files.folder_lock import locked
from popxl_gpt.utils.files.plain import real_path
from popxl_gpt.utils.files.whole import sync

REPLACED = "-replaced"
"""Ends the name of a folder whose place another one takes."""


@contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """Give a new hidden folder beside `target` to fill and `publish`; it is removed at the end
    unless it was published.

    Puts back or removes first what calls that were killed have left: a folder's lock ends with the
    process that holds it. Where there are no locks, that stays.
    """
    folder = _beside(target, f"{os.getpid()}-{time.time_ns()}")
    try:
        folder.mkdir()
        with locked(folder, is_needed=False):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def resumable_folder(target: Path, work: str) -> Iterator[Path]:
    """A folder as of `partial_folder`, but what a call that was stopped or killed has left of the
    same work is given again. An error leaves nothing, but where a disk, or a network, failed,
    memory ran out, or something outside ended the work (`EndedError`).

    While another call does the same work, or where another user has put something in its place,
    this one does it in a folder of its own.

    Args:
        work: names what is made, from what.
    """
    folder = _beside(target, work)
    with ExitStack() as stack:
        try:
            folder.mkdir(exist_ok=True)
            stack.enter_context(locked(folder, is_own=True))
        except OSError:
            folder = stack.enter_context(partial_folder(target))
        try:
            yield folder
        except Exception as error:
            if io_failure(error) is None and not isinstance(error, (MemoryError, EndedError)):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _beside(target: Path, name: str) -> Path:
    """The hidden folder of a call beside `target`, of which others that nobody works in are put
    back or removed.
    """
    target = real_path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.partial-"
    folder = target.parent / f"{prefix}{name}"
    for left in target.parent.glob(f"{glob.escape(prefix)}*{REPLACED}"):
        with suppress(OSError):  # locked, or another user's
            with locked(left, is_own=True):
                if not target.exists():  # the call was killed before the new one had its name
                    os.rename(left, target)
    remove_unlocked(target.parent, f"{glob.escape(prefix)}*", but=folder)
    return folder


def remove_unlocked(folder: Path, pattern: str, but: Path | None = None) -> None:
    """Remove the folders of a pattern, but one, that no call is at work in."""
    for left in folder.glob(pattern):
        if left == but:
            continue
        with suppress(OSError):  # locked
            with locked(left):
                shutil.rmtree(left, ignore_errors=True)


def publish(folder: Path, target: Path, *, overwrite: bool) -> None:
    """Bring `folder` onto the disk, with all that it holds, and rename it to `target`, in place of
    the folder there if `overwrite` allows it. That goes once the disk has the new one's name.

    Raises:
        OSError: if `target` has content and `overwrite` is off; nothing has changed then.
    """
    for path, _, files in os.walk(folder):
        for name in (*files, ""):
            sync(Path(path, name))
    target = real_path(target)
    if overwrite and target.exists():
        replaced = folder.with_name(f"{folder.name}{REPLACED}")
        # so that no other call takes it for left by one that was killed
        with locked(target, is_needed=False):
            os.rename(target, replaced)
            try:
                os.rename(folder, target)
            except OSError:
                os.rename(replaced, target)
                raise
            sync(target.parent)
            removed = folder.with_name(f"{folder.name}-removed")
            os.rename(replaced, removed)  # in parts, it must not be put back
            shutil.rmtree(removed)
    else:
        os.rename(folder, target)
        sync(target.parent)


def check_replaceable(folder: Path, own: str, made_by: str, marks: Sequence[str] = ()) -> None:
    """Refuse to replace what a command has not made: a folder that holds anything else, or that has
    content without all the marks. An empty folder may be replaced.

    Args:
        own: pattern of the paths in a folder that the command makes; of a folder with a slash.
        made_by: the command.
        marks: patterns that some path in it must match, each.
    Raises:
        DataError: names what else is there, or a file that is there in place of a folder.
    """
    names = list(_names_in(folder)) if folder.is_dir() else []
    foreign = [name for name in names if not re.fullmatch(own, name)]
    lacks = not all(any(re.fullmatch(mark, name) for name in names) for mark in marks)
    if folder.is_dir() and not foreign and not (names and lacks):
        return
    kind = f"a folder with {text_of((foreign or names)[0])}" if names else "a file"
    lack = " alone" if names and not foreign else ""
    raise DataError(
        f"{folder}: got {kind}{lack}; expected a folder that {made_by} made, with nothing else in "
        "it, to replace. Choose another name, or move it away."
    )


def _names_in(folder: Path, before: str = "") -> Iterator[str]:
    """The paths of all that a folder holds: a folder's ends with a slash, a link's with an @."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        is_folder = entry.is_dir(follow_symlinks=False)
        name = f"{before}{entry.name}{'@' if entry.is_symlink() else '/' if is_folder else ''}"
        yield name
        if is_folder:
            yield from _names_in(Path(entry.path), name)
