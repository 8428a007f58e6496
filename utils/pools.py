"""Processes that share work."""

import os
import threading
from multiprocessing import connection, parent_process


def end_with_parent() -> None:
    """Let this process of a pool end when the one that began it does, however that ends: others of
    the pool hold the pipes open that it waits at.
    """
    parent = parent_process()
    assert parent is not None, "called in a process of a pool"

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, name="end with parent", daemon=True).start()
