"""A cache over a link of known speed in place of a disk, and the same rows in plain memory to
compare with.
"""

import heapq
import queue
import threading
import time
from contextlib import contextmanager

import numpy as np
import torch
from popxl.errors import RemoteMemoryError
from popxl_engine.machine.device import Processor
from popxl_engine.machine.paging import BLOCK, RULES, AccessTrace, Cache
from popxl_engine.machine.paging.arena import Arena
from popxl_engine.machine.paging.row import Row

LOAD, STORE = False, True


class Link:
    """Memory behind a link: one transfer at a time, each takes latency + bytes / bandwidth, slept
    and not computed.

    Args:
        duplex: one transfer at a time each way.
        bandwidth: bytes/s. latency: seconds.
        fails_at: number of the transfer that fails, from 0.
        clock: what sleeps and tells the time.
    """

    is_direct = True

    def __init__(
        self, nbytes, bandwidth=float("inf"), latency=0.0, duplex=False, fails_at=None, clock=time
    ):
        self.memory, self.duplex, self.clock = torch.zeros(nbytes, dtype=torch.uint8), duplex, clock
        self.bandwidth, self.latency, self.fails_at = bandwidth, latency, fails_at
        self.transfers, self.seconds, self.is_closed = 0, 0.0, False
        self._lock, self._free = threading.Lock(), {"read": 0.0, "write": 0.0}

    def read(self, start, into):
        self._pass("read", len(into))
        into.copy_(self.memory[start : start + len(into)])

    def write(self, start, data):
        self._pass("write", len(data))
        self.memory[start : start + len(data)] = data

    def close(self):
        self.is_closed = True

    def _pass(self, way, nbytes):
        with self._lock:
            number, self.transfers = self.transfers, self.transfers + 1
            seconds = self.latency + nbytes / self.bandwidth
            self.seconds += seconds
            lane = way if self.duplex else "read"
            self._free[lane] = until = max(self._free[lane], self.clock.perf_counter()) + seconds
        if number == self.fails_at:
            raise RemoteMemoryError("link: got 'Input/output error'; expected a link that works.")
        while (left := until - self.clock.perf_counter()) > 0:
            self.clock.sleep(left)


class Clock:
    """Time that passes only while the program and all threads of caches sleep or wait: however busy
    the machine is, what they compute takes none. It stands for the modules `threading` and `time`
    where caches use them.
    """

    RLock = staticmethod(threading.RLock)

    def __init__(self):
        self.seconds, self.lock = 0.0, threading.Lock()
        self.awake = 1
        self._sleepers, self._count = [], 0

    def perf_counter(self):
        return self.seconds

    def sleep(self, seconds):
        woken = threading.Event()
        with self.lock:
            self._count += 1
            heapq.heappush(self._sleepers, (self.seconds + seconds, self._count, woken))
        self.rest()
        woken.wait()

    def rest(self):
        """A thread sleeps or waits. If it is the last one, it is now when the first sleeper
        wakes.
        """
        with self.lock:
            self.awake -= 1
            if not self.awake and self._sleepers:
                self.seconds, _, woken = heapq.heappop(self._sleepers)
                self.awake = 1
                woken.set()

    def wake(self):
        """A thread has been told to go on."""
        with self.lock:
            self.awake += 1

    def Thread(self, **options):  # noqa: N802 - the module's name
        self.wake()
        return threading.Thread(**options)

    def Condition(self, lock):  # noqa: N802 - the module's name
        return Waiting(lock, self)


class Waiting:
    """A condition of `Clock`: threads that are notified are awake before anybody else comes to
    rest.
    """

    def __init__(self, lock, clock):
        self.condition, self.clock, self.waiting = threading.Condition(lock), clock, []

    def wait(self):
        told = []
        self.waiting.append(told)
        self.clock.rest()
        while not told:
            self.condition.wait()

    def notify(self, count=1):
        for told in self.waiting[:count]:
            told.append(True)
            self.clock.wake()
        del self.waiting[:count]
        self.condition.notify_all()

    def notify_all(self):
        self.notify(len(self.waiting))


class Late(Processor):
    """A device that does in order, and later, what it is asked for, as a GPU does: each request
    takes some seconds.

    In memory that it gives, it has still to do what it was asked for there before.
    """

    def __init__(self, seconds):
        self.seconds, self.requests = seconds, queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    def ask(self, request):
        self.requests.put(request)

    def memory(self, nbytes):
        memory = super().memory(nbytes)
        self.ask(lambda: memory.bytes.fill_(0xAB))
        return memory

    def fence(self):
        passed = EventFence()
        self.requests.put(passed.event.set)
        return passed

    def _work(self):
        while True:
            request = self.requests.get()
            if not isinstance(getattr(request, "__self__", None), threading.Event):
                time.sleep(self.seconds)
            request()


class EventFence:
    """A fence of `Late`."""

    def __init__(self):
        self.event = threading.Event()

    @property
    def is_done(self):
        return self.event.is_set()

    def wait(self):
        self.event.wait()


class Prompt(Processor):
    """A device that does at once what it is asked for."""

    def ask(self, request):
        request()


class Rows:
    """Rows of so many blocks each, in a cache with memory for so many blocks."""

    def __init__(
        self,
        blocks,
        memory,
        events=None,
        carries=None,
        rules=RULES,
        look_ahead=True,
        device=None,
        **link,
    ):
        starts = np.cumsum([0, *blocks]) * BLOCK
        self.rows = [
            Row(i, int(starts[i]), n * BLOCK, carries is None or i in carries)
            for i, n in enumerate(blocks)
        ]
        self.link = Link(int(starts[-1]), **link)
        trace = AccessTrace(events, [row.size for row in self.rows]) if events else None
        self.device = device or Prompt()
        arena = Arena(memory * BLOCK, self.device)
        self.cache = Cache(self.rows, arena, self.link, trace, look_ahead, rules, self.device)

    @contextmanager
    def borrowed(self, number):
        """The row's memory, as numbers."""
        row = self.rows[number]
        memory = self.cache.borrow(row)
        try:
            yield memory.view(torch.int64)
        finally:
            self.cache.release(row)

    def store(self, number, value):
        row = self.rows[number]
        memory = self.cache.borrow_to_fill(row).view(torch.int64)
        self.device.ask(lambda: memory.copy_(torch.as_tensor(value)))
        self.cache.filled(row)

    @contextmanager
    def run(self):
        self.cache.begin()
        try:
            yield
        finally:
            self.cache.leave()
        self.cache.check()

    def take(self, events, work=lambda: None):
        """One run that only takes rows."""
        with self.run():
            for number, stores in events:
                if stores:
                    self.store(number, number)
                else:
                    with self.borrowed(number):
                        work()


def sweep(count):
    """Rows one after the other, each changed."""
    return [event for row in range(count) for event in ((row, LOAD), (row, STORE))]
