"""The threads that move rows between a store and memory, and what waits for them."""

import atexit
import threading
import time
import weakref
from typing import Protocol

from popxl.errors import RemoteMemoryError
from popxl.remote_files import FileTraffic

from popxl_engine.machine.paging.row import Transfer
from popxl_engine.machine.paging.store import Store

WAYS = ("read", "write")
"""The methods of a `Store`, each with a thread."""

PATIENCE = 10
"""Seconds that the end of a program waits for a transfer that has begun."""


class Queue(Protocol):
    """The rows that are to go one way. The lock is held around its methods."""

    def next(self) -> Transfer | None:
        """The transfer to do next. None where there is none yet."""

    def finish(self, transfer: Transfer) -> None:
        """Note that a transfer is done."""


class Transfers:
    """One thread each way, and one lock over all that a cache knows.

    Args:
        store: what rows are read from and written to.
    """

    def __init__(self, store: Store):
        self.store, self.traffic = store, FileTraffic(is_direct=store.is_direct)
        # a borrowed tensor may go in the middle of anything, and then gives its row back
        self.lock = threading.RLock()
        self.progress = threading.Condition(self.lock)
        """Notified when the program may go on."""
        self.failure: Exception | None = None
        self._work_is_there = {way: threading.Condition(self.lock) for way in WAYS}
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        self._running = 0
        """Threads that have not ended."""

    def start(self, *queues: Queue) -> None:
        """Start the threads, with a queue for each of `WAYS`."""
        self._running = len(WAYS)
        self._threads = [
            threading.Thread(target=self._work, args=of_one, daemon=True)
            for of_one in zip(WAYS, queues)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(end, weakref.ref(self))

    def close(self) -> None:
        """Tell the threads to end; the last one gives the store up. Waits for nothing."""
        if not any(thread.is_alive() for thread in self._threads):
            return  # in a fork none is, and one may have had the lock
        with self.lock:
            self._is_closed = True
            for condition in (self.progress, *self._work_is_there.values()):
                condition.notify_all()

    def join(self, seconds: float) -> None:
        """Wait for each thread's end, for some time."""
        for thread in self._threads:
            thread.join(seconds)

    def wake(self, way: str) -> None:
        """Have a thread ask its queue again, as it may have a transfer now."""
        self._work_is_there[way].notify()

    def check(self) -> None:
        """RemoteMemoryError if a transfer has failed."""
        if self.failure is not None:
            raise RemoteMemoryError(str(self.failure)) from self.failure

    def wait(self, counter: str) -> None:
        """Wait for progress, and add the seconds to a counter of the traffic."""
        begin = time.perf_counter()
        self.progress.wait()
        seconds = time.perf_counter() - begin
        setattr(self.traffic, counter, getattr(self.traffic, counter) + seconds)

    def _work(self, way: str, queue: Queue) -> None:
        """A thread: the transfers of a queue until the end."""
        try:
            while (transfer := self._next(way, queue)) is not None:
                for fence in transfer.fences:
                    fence.wait()
                self._move(way, transfer)
                with self.lock:
                    transfer.is_done, transfer.memory = True, None
                    queue.finish(transfer)
                    self.progress.notify_all()
        except Exception as error:  # of the device, at a fence
            self._fail(error)
        with self.lock:
            self._running -= 1
            if not self._running:
                self.store.close()

    def _next(self, way: str, queue: Queue) -> Transfer | None:
        """The next transfer of a queue; waits for it. None at the end."""
        with self.lock:
            while not self._is_closed:
                if (transfer := queue.next()) is not None:
                    return transfer
                self._work_is_there[way].wait()
        return None

    def _move(self, way: str, transfer: Transfer) -> None:
        """Read or write a row, and count it. A failure is told to the program, and ends nothing by
        itself.
        """
        begin = time.perf_counter()
        try:
            getattr(self.store, way)(transfer.row.start, transfer.memory)
        except Exception as error:
            self._fail(error)
        seconds, size, traffic = time.perf_counter() - begin, transfer.row.size, self.traffic
        if way == "read":
            traffic.reads, traffic.read_bytes = traffic.reads + 1, traffic.read_bytes + size
            traffic.read_seconds += seconds
        else:
            traffic.writes, traffic.written_bytes = traffic.writes + 1, traffic.written_bytes + size
            traffic.write_seconds += seconds

    def _fail(self, error: Exception) -> None:
        """Have an error raised where the program next asks for a row, or waits for one."""
        with self.lock:
            self.failure = self.failure or error
            self.progress.notify_all()


def end(transfers: "weakref.ref[Transfers]") -> None:
    """End a cache's threads before the interpreter ends: one that is in torch then aborts the
    process.
    """
    alive = transfers()
    if alive is not None:
        alive.close()
        alive.join(PATIENCE)
