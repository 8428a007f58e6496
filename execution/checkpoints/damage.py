"""What is wrong with a checkpoint that is not as it was saved."""

import errno
from collections.abc import Sequence
from pathlib import Path

from popxl_gpt.utils.errors import PointerError, UserError, io_failure, unreadable
from popxl_gpt.utils.files.bounded import shown
from popxl_gpt.utils.files.plain import NO_FILE

OLDER = (
    "The checkpoint is damaged: load an older one with --checkpoint.load; auto finds the newest "
    "whole one."
)


class DeletedError(UserError):
    """A checkpoint that is not there, or no longer.

    Attributes:
        folder: the checkpoint.
    """

    def __init__(self, folder: Path, text: str):
        self.folder = folder
        super().__init__(text)


class DamagedError(UserError):
    """A checkpoint that is not as it was saved.

    Attributes:
        problem: what was found and what was expected.
    """

    def __init__(self, problem: str):
        self.problem = problem
        super().__init__(f"{problem}. {OLDER}")


def damaged(path: Path | str, got: str, expected: str) -> DamagedError:
    """The error for something of a checkpoint that is other than it was saved."""
    return DamagedError(f"{path}: got {got}; expected {expected}")


def not_read(path: Path, error: OSError) -> UserError:
    """The error for a file of a checkpoint that is not read. It is damaged where nothing is there
    that could be read, and not where a disk, or a network, does not give what is there.
    """
    if isinstance(error, PointerError):
        return unreadable(path, error)
    if isinstance(error, PermissionError):
        return UserError(
            f"{path}: got '{error.strerror}'; expected a file that can be read. Check its "
            "permissions."
        )
    if error.errno in (errno.ENOENT, errno.ESTALE) and not path.parent.exists():
        return DeletedError(
            path.parent,
            f"{path.parent}: got a checkpoint that was deleted while it was read; expected one "
            "that stays. A run deletes its old ones: give its folder for the newest, or train it "
            "with a larger --checkpoint.keep.",
        )
    if error.errno in NO_FILE:
        return damaged(path, f"'{error.strerror}'", "a readable file")
    if io_failure(error) is None:
        return unreadable(path, error)
    return UserError(
        f"{path}: got '{error.strerror}' while reading; expected a disk, or a network, that works. "
        f"Start again; if it fails again, rename {path.parent}: auto then takes the newest whole "
        "checkpoint that is left."
    )


def some_of(names: "Sequence[str]") -> str:
    """The first ones of many names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(shown, names[:3])) + more
