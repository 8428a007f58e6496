"""Modules, programs and what is compiled of them are many objects that stay, which Python's garbage
collector would go through again and again.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """A block in which nothing looks for garbage in cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
