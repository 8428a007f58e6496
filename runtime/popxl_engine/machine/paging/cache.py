"""Rows between a store and an arena: which are in memory, which come next, and what must wait for
what.

A row leaves memory for one that is used sooner: among rows that nobody uses, those go whose next
use is farthest (Belady 1966), as seen from where the other one is needed (Cao et al. 1995). One
thread reads, ahead of the program and in its order, as far as there are rows to give up; another
writes what rows that leave have changed. Four rules keep the contents right:

- `reads_wait`: a row is not read from the store before what it had in memory is written there;
- `pins`: a row stays where it is while a tensor borrows it;
- `memory_waits`: memory is not used again before what was in it is written;
- `fences`: nothing is read into memory, or written from it, before the device has done what it was
  asked to do there. What the program asks for itself needs no such wait, as the device keeps that
  order.

Tests take each rule away and must fail.
"""

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
from popxl.errors import RemoteMemoryError
from popxl.remote_files import FileTraffic

from popxl_engine.machine.device import PROCESSOR, Device, Fence
from popxl_engine.machine.paging.access_trace import NEVER, AccessTrace
from popxl_engine.machine.paging.arena import Arena, Extent, Window, until_now
from popxl_engine.machine.paging.row import Before, Row, Write
from popxl_engine.machine.paging.store import Store

RULES = frozenset({"reads_wait", "pins", "memory_waits", "fences"})
MARGIN = 2
"""Looking ahead leaves in memory what moves in the time before, up to one part in so many of the
memory: else, with a trace that goes round, the row that is missed least is the one used last, and
nothing could be fetched before it is.
"""

PATIENCE = 10
"""Seconds that the end of a program waits for a transfer that has begun."""


class Cache:
    """The rows of one replica.

    Args:
        trace: the rows of every run in order; without it rows come when they are asked for, and
            those go that were not used for longest.
        look_ahead: fetch rows before they are asked for.
        rules: what keeps contents right (tests take one away).
        device: where the arena is.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        arena: Arena,
        store: Store,
        trace: AccessTrace | None = None,
        look_ahead: bool = True,
        rules: frozenset[str] = RULES,
        device: Device = PROCESSOR,
    ):
        self.rows, self.arena, self.store, self.rules = rows, arena, store, rules
        self.device = device
        self.trace = trace if trace is not None and len(trace) else None
        self.traffic = FileTraffic(is_direct=store.is_direct)
        self.now = 0
        """Events of the trace so far, over all runs."""
        self._looks_ahead = look_ahead and self.trace is not None
        self._ahead = 0
        """Time of the event that is looked at next."""
        self._passed = 0.0
        """Bytes that the trace moves before that time."""
        self._wanted: Row | None = None
        """What the program waits for."""
        self._is_cramped = False
        """Whether it waits because rows in use leave no memory in one piece."""
        self._stalled_by: Row | None = None
        """What must be given back before looking ahead can go on."""
        self._is_short = False
        """Whether it goes on with any row that is given back, as there is little memory."""
        self._margin = sum(e.size for e in arena.extents) // MARGIN
        self._in_run = self._has_begun = self._is_closed = False
        self._failure: Exception | None = None
        self._to_read: deque[Row] = deque()
        self._to_write: deque[Write] = deque()
        # a borrowed tensor may go in the middle of anything, and then gives its row back
        lock = threading.RLock()
        self._lock, self._progress = lock, threading.Condition(lock)
        self._read_work, self._write_work = threading.Condition(lock), threading.Condition(lock)
        self._locate()
        self._threads = 2
        """That have not ended."""
        works = (self._read_rows, self._write_rows)
        self._workers = [
            threading.Thread(target=self._work, args=(work,), daemon=True) for work in works
        ]
        for worker in self._workers:
            worker.start()
        atexit.register(end, weakref.ref(self))

    # A program's side

    def begin(self) -> None:
        """A run begins. One that did not end is forgotten."""
        with self._lock:
            if self.trace is not None and self.now % len(self.trace):
                self.now += len(self.trace) - self.now % len(self.trace)
                self._locate()
            self._in_run = self._has_begun = True
            self._look_again()

    def leave(self) -> None:
        """A run has ended, or been given up."""
        with self._lock:
            self._in_run = False

    def check(self) -> None:
        """RemoteMemoryError if a transfer has failed."""
        if self._failure is not None:
            raise RemoteMemoryError(str(self._failure)) from self._failure

    def borrow(self, row: Row) -> torch.Tensor:
        """Pin a row with its contents in memory; returns its bytes. `release` must follow."""
        with self._lock:
            self._advance(row, stores=False)
            return self._pinned(row, fill=True)

    def borrow_to_fill(self, row: Row) -> torch.Tensor:
        """Pin a row whose contents do not matter, as they are replaced; `filled` must follow."""
        with self._lock:
            self._advance(row, stores=True)
            return self._pinned(row, fill=False)

    def filled(self, row: Row) -> None:
        """A row that was pinned to be filled has its contents."""
        with self._lock:
            row.holds = row.dirty = True
            self.release(row)

    def release(self, row: Row) -> None:
        """Give a row back."""
        with self._lock:
            row.pins -= 1
            if not row.pins:
                row.fence = self.device.fence()
                self._progress.notify_all()
                if self._stalled_by is row or self._is_short and self._is_free(row):
                    self._read_work.notify()

    @property
    def is_in_use(self) -> bool:
        """Whether a run goes on, or a tensor borrows a row."""
        with self._lock:
            return self._in_run or any(row.pins for row in self.rows)

    def park(self) -> None:
        """Put all rows into the store, and give the arena up; not while it is in use, and nothing
        may use it then.

        Raises:
            RemoteMemoryError: a transfer has failed.
        """
        with self._lock:
            self._has_begun = False  # so that nothing is looked ahead to
            for row in self._to_read:
                row.queued = False
            self._to_read.clear()
            while any(row.queued for row in self.rows):  # the one that is being read
                self.check()
                self._wait("waited_for_reads")
            self._empty(self.arena.extents)
            while self._to_write:
                self.check()
                self._wait("waited_for_writes")
            self.check()
            self.arena = Arena(0, self.device)

    def resume(self, arena: Arena) -> None:
        """Go on after `park` with an arena of the same size."""
        with self._lock:
            self.arena = arena

    def close(self) -> None:
        """Tell the threads to end; the last one gives the file up. Waits for nothing."""
        if not any(worker.is_alive() for worker in self._workers):
            return  # in a fork none is, and one may have had the lock
        with self._lock:
            self._is_closed = True
            for condition in (self._read_work, self._write_work, self._progress):
                condition.notify_all()

    # The order of things; all of it under the lock

    def _locate(self) -> None:
        """Set every row's next use as it is at the beginning of a run."""
        self._ahead = self.now
        if self.trace is not None:
            for row in self.rows:
                row.next = self.trace.next_use(row.index, self.now)

    def _advance(self, row: Row, stores: bool) -> None:
        """A row is asked for."""
        if self.trace is None:
            self.now += 1
            row.next = -self.now
        elif self._in_run:
            assert self.trace.at(self.now) == (row.index, stores), (
                "a run takes rows in the trace's order"
            )
            self.now += 1
            row.next = self.trace.next_use(row.index, self.now)

    def _worth(self, row: Row) -> float | None:
        """How little a row in memory is missed: the time of its next use. None where it must
        stay.
        """
        pinned = row.pins > 0 and "pins" in self.rules
        if pinned or row is self._wanted or row.queued or not self._has_memory(row):
            return None
        return NEVER if not row.holds or self._is_over(row, row.next) else row.next

    def _is_over(self, row: Row, next_use: float) -> bool:
        """Whether nobody will ask for a row's contents: its next use, in this run or the next one,
        replaces them.
        """
        return not row.carries and self.trace is not None and self.trace.at(int(next_use))[1]

    def _later_worth(self, row: Row) -> float | None:
        """How little a row is missed once the program is where it is looked ahead to. None where it
        was used last.
        """
        assert self.trace is not None
        if not row.seen <= self._ahead <= row.later:
            row.seen, row.later = self._ahead, self.trace.next_use(row.index, self._ahead)
            row.passed = self.trace.moved_until(self.trace.last_use(row.index, self._ahead))
        if self._passed - row.passed < self._margin:
            return None
        return NEVER if self._is_over(row, row.later) else row.later

    def _is_free(self, row: Row) -> bool:
        """Whether a row has been used for the last time before where it is looked ahead to."""
        return self._worth(row) is not None and row.next > self._ahead

    def _has_memory(self, row: Row) -> bool:
        """Whether what was in a row's memory before is written."""
        if row.after:
            row.after = [one for one in row.after if not one.is_done]
        return "memory_waits" not in self.rules or not any(
            isinstance(one, Write) for one in row.after
        )

    def _can_be_read(self, row: Row) -> bool:
        """Whether a row may be read, but for what the device still does with its memory."""
        is_written = row.last is None or row.last.is_done or "reads_wait" not in self.rules
        return is_written and self._has_memory(row)

    def _fences(self, row: Row) -> list[Fence]:
        """What the device still does with a row's memory."""
        return (
            [one for one in row.after if not isinstance(one, Write)]
            if "fences" in self.rules
            else []
        )

    def _pinned(self, row: Row, fill: bool) -> torch.Tensor:
        """Pin a row, and wait until its memory is there."""
        self._wanted = row
        try:
            self._bring(row, fill)
        finally:
            self._wanted, self._is_cramped = None, False
        row.pins += 1
        assert row.memory is not None
        return row.memory

    def _bring(self, row: Row, fill: bool) -> None:
        """Wait until a row's memory is there: with its contents, or free to be filled."""
        while True:
            self.check()
            if row.memory is None:
                if self._make_room(row, above=-NEVER):
                    self._look_again()
                elif self._is_quiet():
                    self._make_room_apart(row)
                else:
                    self._wait("waited_for_memory")
                continue
            if row.holds or not (fill or row.queued) and self._has_memory(row):
                return
            if fill and not row.queued:
                self._queue(row, first=True)
            self._wait("waited_for_reads" if self._can_be_read(row) else "waited_for_writes")

    def _look_again(self) -> None:
        """Look ahead from here: rows may have gone that are needed soon."""
        self._ahead, self._stalled_by = self.now, None
        self._read_work.notify()

    def _queue(self, row: Row, first: bool = False) -> None:
        row.queued = True
        (self._to_read.appendleft if first else self._to_read.append)(row)
        self._read_work.notify()

    def _make_room(self, row: Row, above: float) -> bool:
        """Give a row memory, of rows that are used after a time. False where there are none."""
        window = self.arena.find(row.size, self._worth, above)
        if window is not None:
            self._move_in(row, window)
        return window is not None

    def _make_room_apart(self, row: Row) -> None:
        """Give a row memory beside the arena, for pieces of it that go back to the system
        meanwhile.

        Where rows that are in use leave enough memory, but not in one piece. All others leave
        first; while they are being written, this does nothing more, and is to be called again.

        Raises:
            RemoteMemoryError: there is not enough.
        """
        free = [e for e in self.arena.extents if e.row is None or self._worth(e.row) is not None]
        if sum(extent.size for extent in free) < row.size:
            pinned = sum(r.size for r in self._inside() if r.pins)
            raise RemoteMemoryError(
                f"remote memory: got {sum(e.size for e in self.arena.extents)} bytes for rows on "
                f"{self.device.where}, of which {pinned} are in use, for a row of {row.size}; "
                "expected room for it. Give rows more memory."
            )
        self._empty(free)
        self._is_cramped = True
        if self._to_write:
            return
        pieces = self.arena.pieces(free, row.size)
        for extent in pieces:
            for one in extent.after:
                if not isinstance(one, Write):
                    one.wait()
            extent.after = []
            self.arena.decommit(extent)
        row.memory = self.device.memory(row.size).bytes
        row.is_apart, row.holds, row.after = True, False, until_now(self.device)
        for extent in pieces:
            extent.row = row

    def _move_in(self, row: Row, window: Window) -> None:
        """Give a row memory in place of others."""
        after: list[Before] = []
        for extent in self.arena.extents[slice(*window)]:
            after += extent.after if extent.row is None else self._leave(extent.row)
        row.holds, row.after = False, [one for one in after if not one.is_done]
        row.memory = self.arena.allocate(window, row.size, row, row.after)

    def _empty(self, extents: Sequence[Extent]) -> None:
        """Have the rows of some extents go out of memory."""
        for extent in extents:
            if extent.row is not None and extent.row.memory is not None:
                before = self._leave(extent.row)
                extent.row, extent.after = None, before

    def _leave(self, row: Row) -> list[Before]:
        """A row goes out of memory. Returns what must be done before that is used again."""
        before = row.after if row.fence is None else [*row.after, row.fence]
        assert row.memory is not None
        if row.dirty and row.holds and not self._is_over(row, row.next):
            row.last = Write(row, row.memory, row.fence)
            before = [*before, row.last]
            self._to_write.append(row.last)
            self._write_work.notify()
        if row.is_apart:
            for extent in self.arena.extents:
                if extent.row is row:
                    extent.row, extent.after = None, before
        row.memory, row.is_apart, row.holds, row.dirty, row.fence, row.after = (
            None,
            False,
            False,
            False,
            None,
            [],
        )
        return before

    def _look_ahead(self) -> None:
        """Give memory to the rows that come next, in order, and queue those whose contents are
        needed.
        """
        if (
            not (self._looks_ahead and self._has_begun)
            or self._is_cramped
            or self._failure is not None
        ):
            return
        assert self.trace is not None
        if self._ahead < self.now:
            self._ahead, self._stalled_by = self.now, None
        if self._stalled_by is not None and not self._is_free(self._stalled_by):
            return
        while self._ahead < self.now + len(self.trace):
            index, stores = self.trace.at(self._ahead)
            row = self.rows[index]
            if row.memory is None:
                if not self._make_room_later(row):
                    return
                if not stores:
                    self._queue(row)
            self._ahead += 1

    def _make_room_later(self, row: Row) -> bool:
        """Give memory to the row that is looked ahead to. False where others are to be used
        first.
        """
        assert self.trace is not None
        self._passed = self.trace.moved_until(self._ahead)
        window = self.arena.find(row.size, self._later_worth, self._ahead)
        self._is_short = window is None
        if window is None:  # what is free now, though it may be missed sooner than others
            self._stalled_by = None
            return self._make_room(row, self._ahead)
        inside = [
            extent.row for extent in self.arena.extents[slice(*window)] if extent.row is not None
        ]
        self._stalled_by = next((other for other in inside if not self._is_free(other)), None)
        if self._stalled_by is None:
            self._move_in(row, window)
        return self._stalled_by is None

    # Waiting, and what goes wrong

    def _wait(self, what: str) -> None:
        begin = time.perf_counter()
        self._progress.wait()
        setattr(self.traffic, what, getattr(self.traffic, what) + time.perf_counter() - begin)

    def _is_quiet(self) -> bool:
        """Whether nothing is being moved that would make room."""
        return not self._to_write and all(
            not r.queued and self._has_memory(r) for r in self._inside()
        )

    def _inside(self) -> list[Row]:
        return list({id(e.row): e.row for e in self.arena.extents if e.row is not None}.values())

    # The threads

    def _work(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # of the device, at a fence
            self._fail(error)
        with self._lock:
            self._threads -= 1
            if not self._threads:
                self.store.close()

    def _read_rows(self) -> None:
        while (row := self._next_read()) is not None:
            assert row.memory is not None
            for fence in self._fences(row):
                fence.wait()
            self._transfer("read", row, row.memory)
            with self._lock:
                row.queued, row.holds, row.dirty = False, True, False
                self._progress.notify_all()

    def _next_read(self) -> Row | None:
        """The first row in the queue that may be read; waits for it. None at the end."""
        with self._lock:
            while not self._is_closed:
                self._look_ahead()
                for row in self._to_read:
                    if self._can_be_read(row):
                        self._to_read.remove(row)
                        return row
                self._read_work.wait()
        return None

    def _write_rows(self) -> None:
        while (write := self._next_write()) is not None:
            assert write.memory is not None
            if write.fence is not None and "fences" in self.rules:
                write.fence.wait()
            self._transfer("write", write.row, write.memory)
            with self._lock:
                write.is_done, write.memory = True, None
                self._to_write.popleft()
                self._progress.notify_all()
                self._read_work.notify()

    def _next_write(self) -> Write | None:
        with self._lock:
            while not self._is_closed:
                if self._to_write:
                    return self._to_write[0]
                self._write_work.wait()
        return None

    def _transfer(self, way: str, row: Row, memory: torch.Tensor) -> None:
        """Read or write a row, and count it. A failure is told to the program, and ends nothing by
        itself.
        """
        begin = time.perf_counter()
        try:
            getattr(self.store, way)(row.start, memory)
        except Exception as error:
            self._fail(error)
        seconds, traffic = time.perf_counter() - begin, self.traffic
        if way == "read":
            traffic.reads, traffic.read_bytes = traffic.reads + 1, traffic.read_bytes + row.size
            traffic.read_seconds += seconds
        else:
            traffic.writes, traffic.written_bytes = (
                traffic.writes + 1,
                traffic.written_bytes + row.size,
            )
            traffic.write_seconds += seconds

    def _fail(self, error: Exception) -> None:
        """Have an error raised where the program next asks for a row, or waits for one."""
        with self._lock:
            self._failure = self._failure or error
            self._progress.notify_all()


def end(cache: "weakref.ref[Cache]") -> None:
    """End a cache's threads before the interpreter ends: one that is in torch then aborts the
    process.
    """
    found = cache()
    if found is not None:
        found.close()
        for worker in found._workers:
            worker.join(PATIENCE)
