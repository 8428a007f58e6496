"""Signs of life between processes, so that none waits for ever for one that is gone without a word.

Each process sends one to the next every second, from a thread. Where none comes from the one
before, since its machine is down, the link is cut or it is stopped, this process ends, whatever it
is waiting for. A connection that was closed is left to those who use it.
"""

import os
import socket
import sys
import threading
from typing import List, Sequence

BEAT_SECONDS = 1.0
LAST_SECONDS = 3.0
"""How long the end of a process waits for these threads."""
ALIVE = b"\1"


class Pulse:
    """The two threads of a process.

    Args:
        following, before: connections to the next instance and from the one before.
        index, names: of this instance; what all are called.
        seconds: how long a sign of life may take.
    """

    def __init__(
        self,
        following: socket.socket,
        before: socket.socket,
        index: int,
        names: Sequence[str],
        seconds: float,
    ):
        self._following, self._before = following, before
        self._index, self._names, self._seconds = index, names, seconds
        self._leaving = threading.Event()
        self._threads: List[threading.Thread] = []
        for work in (self._send, self._receive):
            self._threads.append(threading.Thread(target=work, name="pulse", daemon=True))
            self._threads[-1].start()

    def stop(self) -> None:
        """Say goodbye, which is that the connection ends, and end the threads."""
        self._leaving.set()
        for connection in (self._following, self._before):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the other end has gone
        for thread in self._threads:
            thread.join(LAST_SECONDS)

    def _send(self) -> None:
        self._following.settimeout(self._seconds)
        try:
            while not self._leaving.wait(BEAT_SECONDS):
                self._following.sendall(ALIVE)
        except OSError:
            return  # it has left, or will be missed by whoever waits for it

    def _receive(self) -> None:
        self._before.settimeout(self._seconds)
        try:
            while self._before.recv(64):
                pass
        except TimeoutError:
            if not self._leaving.is_set():
                self._end((self._index - 1) % len(self._names))
        except OSError:
            return

    def _end(self, before: int) -> None:
        print(
            f"popdist: instance {self._index} of {len(self._names)} got no sign of life from "
            f"instance {before} ({self._names[before]}) for {self._seconds:g} s; expected one "
            "each second. Its machine is down, its process is stopped, or the link between them "
            "is cut. Start the run again, from its last checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
