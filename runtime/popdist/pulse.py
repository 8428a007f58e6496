"""Signs of life between processes, so that none waits for ever for one that is gone without a word.

Each process sends one to the next every second, from a thread. Where none comes from the one before, since its machine
is down, the link is cut or it is stopped, this process ends, whatever it is waiting for. A connection that was closed
is left to those who use it.
"""

import os
import sys
import threading
from typing import Any, List, Sequence

BEAT_SECONDS = 1.0
LAST_SECONDS = 3.0
"""How long the end of a process waits for these threads."""
ALIVE, LEAVING = 1, 0


class Pulse:
    """The two threads of a process.

    Args:
        torch, distributed: the modules.
        group: a process group of their own; its timeout is how long a sign of life may take.
        index, names: of this instance; what all are called.
        seconds: that timeout, for the message.
    """

    def __init__(self, torch: Any, distributed: Any, group: Any, index: int, names: Sequence[str], seconds: float):
        self._torch, self._distributed, self._group = torch, distributed, group
        self._index, self._names, self._seconds = index, names, seconds
        self._leaving = threading.Event()
        self._threads: List[threading.Thread] = []
        for work in (self._send, self._receive):
            self._threads.append(threading.Thread(target=work, name="pulse", daemon=True))
            self._threads[-1].start()

    def stop(self) -> None:
        """Say goodbye, and end the threads."""
        self._leaving.set()
        for thread in self._threads:
            thread.join(LAST_SECONDS)

    def _message(self, value: int) -> Any:
        return self._torch.full((1,), value, dtype=self._torch.uint8)

    def _send(self) -> None:
        following = (self._index + 1) % len(self._names)
        try:
            while True:
                is_last = self._leaving.wait(BEAT_SECONDS)
                message = self._message(LEAVING if is_last else ALIVE)
                self._distributed.isend(message, following, group=self._group).wait()
                if is_last:
                    return
        except RuntimeError:
            return  # it has left, or will be missed by whoever waits for it

    def _receive(self) -> None:
        before = (self._index - 1) % len(self._names)
        try:
            while not self._leaving.is_set():
                message = self._message(ALIVE)
                self._distributed.irecv(message, before, group=self._group).wait()
                if int(message) == LEAVING:
                    return
        except RuntimeError as error:
            if "imed out" in str(error) and not self._leaving.is_set():
                self._end(before)

    def _end(self, before: int) -> None:
        print(
            f"popdist: instance {self._index} of {len(self._names)} got no sign of life from instance {before} "
            f"({self._names[before]}) for {self._seconds:g} s; expected one each second. Its machine is down, its "
            "process is stopped, or the link between them is cut. Start the run again, from its last checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
