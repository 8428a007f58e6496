"""Heartbeats: so that no process of a run waits for ever for one that is gone without a word.

Instances send each other a byte every second, each to the next, over a connection. Launchers keep
the status of their machine in the store where they have met, which is machine 0's, and read that of
the others. Threads do both: a link that is cut keeps only those waiting.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from poprun import wire
from poprun.deadline import Deadline, join
from poprun.store import Client, StoreError

BEAT_SECONDS = 1.0
"""Seconds from one heartbeat of an instance to the next."""
LAST_SECONDS = 3.0
"""How long the end of an instance waits for its threads."""
ALIVE = b"\1"
TICK_SECONDS = 0.5
"""Seconds from one heartbeat of a machine to the next."""
SILENT_SECONDS = 60.0
"""A machine whose status stays the same for so long is gone."""
LEAVE_SECONDS = 10.0
"""How long machine 0, at the end, waits for the others to have read that it is."""


class InstanceHeartbeat:
    """The heartbeat of an instance, in two threads.

    Where none comes from the one before, since its machine is down, the link is cut or it is
    stopped, this process ends, whatever it is waiting for. A connection that was closed is left to
    those who use it.

    Args:
        following, before: connections to the next instance and from the one before.
        index, names: of this instance; what all are called.
        seconds: how long a heartbeat may take.
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
        self._threads: list[threading.Thread] = []
        for work in (self._send, self._receive):
            self._threads.append(threading.Thread(target=work, name="heartbeat", daemon=True))
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
            join(thread, LAST_SECONDS)

    def _send(self) -> None:
        try:
            while not self._leaving.wait(BEAT_SECONDS):
                wire.send_all(self._following, ALIVE, Deadline(self._seconds))
        except OSError:
            return  # it has left, or will be missed by whoever waits for it

    def _receive(self) -> None:
        before = self._before
        try:
            while wire.in_time(before, Deadline(self._seconds), before.recv, 64):
                pass
        except TimeoutError as error:
            if error.errno is None and not self._leaving.is_set():
                self._end((self._index - 1) % len(self._names))
        except OSError:
            return

    def _end(self, before: int) -> None:
        print(
            f"popdist: instance {self._index} of {len(self._names)} got no heartbeat from "
            f"instance {before} ({self._names[before]}) for {self._seconds:g} s; expected one "
            "each second. Its machine is down, its process is stopped, or the link between them "
            "is cut. Start the run again, from its last checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


@dataclass(frozen=True)
class MachineStatus:
    """What a launcher says of its machine."""

    count: int = 0
    """The number of its heartbeats."""
    code: int | None = None
    """0: all instances have succeeded; others: the exit code that its launcher ends with."""
    problem: str = ""
    """What happened, where the code is not 0."""
    has_left: bool = False
    """Whether it will read no more."""


class MachineHeartbeat:
    """The heartbeat of a machine, and those of all others of a run.

    Args:
        store: that all machines see, over a connection of its own: a question of another thread may
            end by an exception, and closes its connection.
        index: of this machine.
        count: of machines.
    """

    def __init__(self, store: Client, index: int, count: int):
        self._store, self._index = store, index
        self._own = MachineStatus()
        self._others: dict[int, tuple[MachineStatus, Deadline]] = {
            other: (MachineStatus(), Deadline(SILENT_SECONDS))
            for other in range(count)
            if other != index
        }
        """What they say, and until when that may stay the same."""
        self._thread = threading.Thread(target=self._keep_up, name="heartbeat", daemon=True)
        if self._others:
            self._thread.start()

    def tell(self, code: int, problem: str = "") -> None:
        """Say how the instances of this machine have ended. What was said first stays."""
        if self._own.code is None:
            self._own = MachineStatus(code=code, problem=problem)

    def failure(self) -> tuple[int, str] | None:
        """The exit code and the problem of the first other machine that has one."""
        for other, (status, _) in self._others.items():
            if status.code:
                return status.code, f"machine {other}: {status.problem}"
        return None

    def wait(self) -> tuple[int, str] | None:
        """Wait for the instances of all other machines to succeed. As `failure`; a machine that is
        gone has failed.
        """
        while (found := self.failure()) is None:
            waited_for = {
                other: deadline
                for other, (status, deadline) in self._others.items()
                if status.code is None
            }
            if not waited_for:
                return None
            for other, deadline in waited_for.items():
                if deadline.left() <= 0:
                    return (
                        1,
                        (
                            f"machine {other} has said nothing for {SILENT_SECONDS:g} s; it is "
                            "gone, or the link is."
                        ),
                    )
            time.sleep(TICK_SECONDS)
        return found

    def leave(self) -> None:
        """Say goodbye, and give the others time to have read all."""
        self._own = replace(self._own, has_left=True)
        join(self._thread, LEAVE_SECONDS)

    def _keep_up(self) -> None:
        count = 0
        try:
            while True:
                count, own = count + 1, self._own
                self._store.set(_key(self._index), json.dumps(astuple(replace(own, count=count))))
                self._read()
                if own.has_left and (
                    self._index > 0 or all(status.has_left for status, _ in self._others.values())
                ):
                    return
                time.sleep(TICK_SECONDS)
        except StoreError:  # nobody keeps the store any more
            status, _ = self._others.get(0, (MachineStatus(code=0), None))
            if status.code is None:
                self._others[0] = (
                    MachineStatus(code=1, problem="its poprun is gone."),
                    Deadline(SILENT_SECONDS),
                )

    def _read(self) -> None:
        for other, (before, _) in list(self._others.items()):
            if self._store.has(_key(other)):
                status = MachineStatus(*json.loads(self._store.get(_key(other))))
                if status != before:
                    self._others[other] = status, Deadline(SILENT_SECONDS)


def _key(machine: int) -> str:
    return f"status/{machine}"
