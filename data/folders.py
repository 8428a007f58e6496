"""A folder that is there whole or not at all."""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from popxl_gpt.config.plain_files import real_path


@contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """Give a new hidden folder beside `target` to fill and `publish`; it is removed at the end
    unless it was published.

    Removes first what calls that were killed have left: a folder's lock ends with the process that
    holds it.
    """
    target = real_path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.partial-"
    remove_unlocked(target.parent, f"{prefix}*")
    folder = target.parent / f"{prefix}{os.getpid()}-{time.time_ns()}"
    try:
        folder.mkdir()
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def resumable_folder(target: Path, work: str) -> Iterator[Path]:
    """As `partial_folder`, but what a call that was stopped or killed has left of the same work is
    given again. An error leaves nothing.

    While another call does the same work, this one does it in a folder of its own.

    Args:
        work: names what is made, from what.
    """
    target = real_path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.partial-"
    folder = target.parent / f"{prefix}{work}"
    remove_unlocked(target.parent, f"{prefix}*", but=folder)
    folder.mkdir(exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(_locked(folder))
        except OSError:
            folder = stack.enter_context(partial_folder(target))
        try:
            yield folder
        except Exception:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def remove_unlocked(folder: Path, pattern: str, but: Path | None = None) -> None:
    """Remove the folders of a pattern, but one, that no call is at work in."""
    for left in folder.glob(pattern):
        if left == but:
            continue
        with suppress(OSError):  # locked
            with _locked(left):
                shutil.rmtree(left, ignore_errors=True)


def publish(folder: Path, target: Path, *, overwrite: bool) -> None:
    """Flush `folder` to the disk and rename it to `target`, in place of the folder there if
    `overwrite` allows it.

    Raises:
        OSError: if `target` has content and `overwrite` is off; nothing has changed then.
    """
    flush_folder(folder)
    replaced = (
        folder.with_name(f"{folder.name}-replaced") if overwrite and target.exists() else None
    )
    if replaced:
        os.rename(target, replaced)
    try:
        os.rename(folder, target)
    except OSError:
        if replaced:
            os.rename(replaced, target)
        raise
    if replaced:
        shutil.rmtree(replaced)
    flush_folder(real_path(target).parent)


def flush_folder(folder: Path) -> None:
    """Bring a folder's list of names onto the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
