"""The cache folder: ``POPXL_CACHE_DIR``, or the session options ``enableEngineCaching`` and
``cachePath``.

It holds the generated source of every program that was prepared, ``program_<hash of the
source>.py``, for people to read. Nothing is read back from it, not even for stack traces, and
nothing in it is executed; deleting it is safe.
"""

import hashlib
import logging
import os
import uuid
from pathlib import Path

from popxl.options import SessionOptions

logger = logging.getLogger("popxl")


def cache_folder(options: SessionOptions) -> Path | None:
    """The folder where a program's source is written; None where caching is off or no folder is
    named.
    """
    return Path(options.cachePath) if options.enableEngineCaching and options.cachePath else None


def save_source(folder: Path, text: str) -> Path | None:
    """Write a program's source under the hash of its text, whole or not at all, and return its
    path.

    A folder that cannot be written is a warning, and None.
    """
    path = folder / f"program_{hashlib.sha256(text.encode()).hexdigest()[:16]}.py"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{uuid.uuid4().hex}.part")
        with open(part, "x") as file:  # never through a link
            file.write(text)
        os.replace(part, path)
    except OSError as error:
        logger.warning(
            "cache: the program's source could not be written to %s (%s); going on without.",
            folder,
            error,
        )
        return None
    return path
