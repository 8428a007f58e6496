"""The folder that a report's files go to."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from popxl_gpt.utils.errors import UserError


@contextmanager
def written_to(folder: Path, flag: str) -> Iterator[None]:
    """A block that makes a folder or writes to it: where it cannot, the user hears so, and which
    flag names another.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{flag}: got '{error.strerror}' while writing to {folder}; expected a folder that "
            "takes files. Check its permissions and the space on the disk, or choose another."
        ) from error
