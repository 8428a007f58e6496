"""Making a session makes many objects that stay, which Python's garbage collector would go through
again and again.
"""

import gc
from contextlib import contextmanager
from typing import Iterator


@contextmanager
def without_collection() -> Iterator[None]:
    """Inside, nothing looks for garbage in cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
