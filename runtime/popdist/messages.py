"""Messages between instances: bytes from one to another, told apart by a number, their tag.

Each pair has a connection. A long message begins to travel when the receiver has said where its
bytes go (CLEAR), so that none is kept on the way. Short ones, and parcels, whose size the receiver
need not know, are sent at once, and kept until they are asked for. On one machine the bytes of long
messages go through memory that both ends share, a piece at a time, and only their sizes through the
connection. Messages move while some thread of this process waits for one.

Everything has a fixed form: a header, and as many bytes as it says. Where the two ends do not agree
about a message's size, it fails.
"""

import math
import mmap
import selectors
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from poprun.deadline import SLICE_SECONDS, Deadline

HEADER = struct.Struct("<B7xQQ")
"""What follows, the message's tag, a number of bytes."""
CLEAR, WHOLE, PIECE, TAKEN, PARCEL = range(1, 6)
"""The receiver is ready; the message; a piece is in the shared memory; so much of that is free
again; a parcel.
"""
RING_BYTES = 2**22
"""Memory that a process shares with one other, for what it sends to that. It is used where messages
are long.
"""
PIECE_BYTES = 2**18
SHORT_BYTES, EARLY_BYTES = 2**16, 2**28
"""Messages up to here are short; what is kept of them at the most, from one sender."""
BUFFERS = 16
"""Buffers given to the system at once."""
PARCEL_BYTES = 2**26
PARCELS = 8
"""More of one tag and sender are never under way: all take part in what they belong to."""
CLOSED = "Connection closed by peer"


class TransferError(RuntimeError):
    """A message did not arrive or could not be sent: the other end is gone, or did not answer in
    time.
    """


class Transfer:
    """A message that is to be sent or received."""

    def __init__(self, link: "Link", tag: int, data: Any):
        self.link, self.tag = link, tag
        self.data = memoryview(data).cast("B")
        self.moved = 0
        """Bytes, so far."""
        self.is_done = False

    def move(self, size: int) -> None:
        """Note that so many bytes more have moved."""
        self.moved += size
        self.is_done = self.moved == len(self.data)


class Link:
    """This process's end of the connection with another."""

    def __init__(
        self,
        connection: socket.socket,
        outgoing: mmap.mmap | None,
        incoming: mmap.mmap | None,
    ):
        connection.setblocking(False)
        self.connection = connection
        self.outgoing = None if outgoing is None else memoryview(outgoing)
        self.incoming = None if incoming is None else memoryview(incoming)
        self.written, self.freed, self.read = 0, 0, 0
        """Bytes that went through the shared memories: put into ours, given back from it, taken
        from the other's.
        """
        self.queue: deque[tuple[memoryview, Transfer | None]] = deque()
        """What the connection has not taken yet."""
        self.sends: defaultdict[int, deque[Transfer]] = defaultdict(deque)
        """Sends whose receivers are not ready, by tag."""
        self.receives: defaultdict[int, deque[Transfer]] = defaultdict(deque)
        self.ready: defaultdict[int, deque[int]] = defaultdict(deque)
        """Sizes of messages whose receivers are, while we have none to send."""
        self.long: deque[Transfer] = deque()
        """Transfers that go through the shared memory, the first first."""
        self.parcels: defaultdict[int, deque[bytes]] = defaultdict(deque)
        self.early: defaultdict[int, deque[bytes]] = defaultdict(deque)
        """Short messages that nobody has asked for yet."""
        self.early_bytes = 0
        self.problem: str | None = None
        """Why nothing comes any more."""
        self.is_deaf = False
        """Nothing can be sent any more, while something may still come."""
        self._header = memoryview(bytearray(HEADER.size))
        self._target: memoryview = self._header
        """What is filled next."""
        self._arrived: Callable[[], None] = self._begin
        """What is done once that is filled."""
        self._current: Transfer | None = None

    # What comes

    def take_in(self) -> None:
        """Take what has come."""
        try:
            while self.problem is None:
                count = self.connection.recv_into(self._target)
                if not count:
                    self.end(CLOSED)
                    return
                self._target = self._target[count:]
                if self._current is not None:
                    self._current.move(count)
                if not self._target:
                    self._arrived()
        except BlockingIOError:
            return
        except OSError as error:
            self.end(error.strerror or str(error))

    def _expect(
        self, target: memoryview, arrived: Callable[[], None], transfer: Transfer | None = None
    ) -> None:
        """Fill this memory next, and then do that."""
        self._target, self._arrived, self._current = target, arrived, transfer

    def _begin(self) -> None:
        kind, tag, size = HEADER.unpack(self._header)
        self._next()
        if kind == CLEAR:
            self.ready[tag].append(size)
            self._match(tag)
        elif (
            kind == WHOLE
            and not self.receives[tag]
            and size <= SHORT_BYTES
            and self.early_bytes < EARLY_BYTES
        ):
            self.early_bytes += size
            self._gather(self.early[tag], size, lambda: self._hand_over(tag))
        elif kind == WHOLE:
            transfer = self._receiver(tag, size)
            if transfer is not None:
                self._expect(transfer.data, self._next, transfer)
        elif kind == PIECE:
            self._copy_piece(tag, size)
        elif kind == TAKEN:
            self.freed += size
        elif kind == PARCEL and size <= PARCEL_BYTES and len(self.parcels[tag]) < PARCELS:
            self._gather(self.parcels[tag], size, lambda: None)
        else:
            self.end(f"got a message of kind {kind} with {size} bytes, which none is")

    def _next(self) -> None:
        self._expect(self._header, self._begin)

    def _gather(self, into: deque[bytes], size: int, then: Callable[[], None]) -> None:
        """Keep what comes next."""
        content = bytearray(size)

        def keep() -> None:
            into.append(bytes(content))
            self._next()
            then()

        self._expect(memoryview(content), keep)
        if not size:
            keep()

    def _receiver(self, tag: int, size: int) -> Transfer | None:
        """The receiver of the message that begins."""
        waiting = self.receives[tag]
        if not waiting or size != len(waiting[0].data):
            self.end(
                f"got a message of {size} bytes; expected "
                f"{len(waiting[0].data) if waiting else 'none'}"
            )
            return None
        return waiting.popleft()

    def _copy_piece(self, tag: int, size: int) -> None:
        waiting, memory = self.receives[tag], self.incoming
        begin = self.read % RING_BYTES
        if memory is None or not waiting or not 0 < size <= min(PIECE_BYTES, RING_BYTES - begin):
            return self.end(f"got a piece of {size} bytes, which was not expected")
        transfer = waiting[0]
        if size > len(transfer.data) - transfer.moved:
            return self.end(f"got a piece of {size} bytes, which is too long")
        transfer.data[transfer.moved : transfer.moved + size] = memory[begin : begin + size]
        self.read += size
        transfer.move(size)
        if transfer.is_done:
            waiting.popleft()
        self.put(TAKEN, tag, size)

    # What goes

    def receive(self, transfer: Transfer) -> None:
        """Be ready for a message."""
        self.receives[transfer.tag].append(transfer)
        self._hand_over(transfer.tag)
        if len(transfer.data) > SHORT_BYTES:
            self.put(CLEAR, transfer.tag, len(transfer.data))

    def _hand_over(self, tag: int) -> None:
        """Give what came early to who asks for it."""
        early, waiting = self.early[tag], self.receives[tag]
        while early and waiting and self.problem is None:
            content = early.popleft()
            transfer = self._receiver(tag, len(content))
            if transfer is not None:
                self.early_bytes -= len(content)
                transfer.data[:] = content
                transfer.move(len(content))

    def send(self, transfer: Transfer) -> None:
        """Send a message, a long one once its receiver is ready."""
        if len(transfer.data) <= SHORT_BYTES:
            return self.put(WHOLE, transfer.tag, len(transfer.data), transfer.data, transfer)
        self.sends[transfer.tag].append(transfer)
        self._match(transfer.tag)

    def _match(self, tag: int) -> None:
        ready, sends = self.ready[tag], self.sends[tag]
        while ready and sends:
            transfer, size = sends.popleft(), ready.popleft()
            if size != len(transfer.data):
                return self.end(f"got room for {size} bytes; expected it for {len(transfer.data)}")
            if self.outgoing is not None:
                self.long.append(transfer)
            else:
                self.put(WHOLE, tag, size, transfer.data, transfer)

    def put(
        self,
        kind: int,
        tag: int,
        size: int,
        data: memoryview | None = None,
        transfer: Transfer | None = None,
    ) -> None:
        """Queue a header, and what follows it."""
        self.queue.append((memoryview(HEADER.pack(kind, tag, size)), None))
        if data is not None:
            self.queue.append((data, transfer))

    def give_out(self) -> None:
        """Send what can be sent without waiting."""
        try:
            while not self.is_deaf and (self.queue or self._put_piece()):
                self._sent(
                    self.connection.sendmsg([data for data, _ in islice(self.queue, BUFFERS)])
                )
        except BlockingIOError:
            return
        except OSError:
            self.is_deaf = True  # what has come is still there to be read, up to its end
            self.queue.clear()

    def _sent(self, count: int) -> None:
        while self.queue:
            data, transfer = self.queue[0]
            part = min(count, len(data))
            if transfer is not None:
                transfer.move(part)
            count -= part
            if part < len(data):
                self.queue[0] = data[part:], transfer
                return
            self.queue.popleft()

    def _put_piece(self) -> bool:
        """Put a piece of a long message into the shared memory, where there is room. Returns
        whether.
        """
        if not self.long or self.outgoing is None:
            return False
        transfer, begin = self.long[0], self.written % RING_BYTES
        size = min(PIECE_BYTES, len(transfer.data) - transfer.moved, RING_BYTES - begin)
        if self.written + size - self.freed > RING_BYTES:
            return False
        self.outgoing[begin : begin + size] = transfer.data[transfer.moved : transfer.moved + size]
        self.written += size
        self.put(PIECE, transfer.tag, size)
        transfer.moved += size
        if transfer.moved == len(transfer.data):
            self.long.popleft()
            self.queue[-1] = self.queue[-1][0], _Last(transfer)
        return True

    def end(self, problem: str) -> None:
        """Neither send nor receive any more."""
        self.problem = problem
        self.queue.clear()


class _Last(Transfer):
    """A piece that is done when the header of a message's last piece has left."""

    def __init__(self, transfer: Transfer):
        self._of, self._left = transfer, HEADER.size

    def move(self, size: int) -> None:
        self._left -= size
        self._of.is_done = self._left == 0


class Messages:
    """The messages of this process, with all others.

    Args:
        links: by instance.
    """

    def __init__(self, links: dict[int, Link]):
        self._links = links
        self._state = threading.Condition()
        self._is_polled = False
        """Whether a thread waits for all of them."""
        self._selector = selectors.DefaultSelector()
        for link in links.values():
            self._selector.register(link.connection, selectors.EVENT_READ, link)

    def send(self, instance: int, tag: int, data: Any) -> Transfer:
        """Begin to send a buffer, which must not change before that is done."""
        return self._begin(instance, tag, data, Link.send)

    def receive(self, instance: int, tag: int, data: Any) -> Transfer:
        """Begin to receive into a buffer."""
        return self._begin(instance, tag, data, Link.receive)

    def _begin(
        self, instance: int, tag: int, data: Any, what: Callable[[Link, Transfer], None]
    ) -> Transfer:
        with self._state:
            transfer = Transfer(self._links[instance], tag, data)
            if len(transfer.data):
                what(transfer.link, transfer)
                self._move(transfer.link)
            else:
                transfer.is_done = True
            return transfer

    def wait(self, transfers: Sequence[Transfer], seconds: float) -> None:
        """Wait until all are done.

        Raises:
            TransferError: one of the other ends is gone, or nothing moved for so many seconds.
        """
        left: list[Transfer] = list(transfers)

        def are_done() -> bool:
            left[:] = [transfer for transfer in left if not _is_done(transfer)]
            return not left

        self._wait(are_done, lambda: sum(transfer.moved for transfer in left) - len(left), seconds)

    def move(self, is_over: Callable[[], bool]) -> None:
        """Move messages until something holds: for a thread beside those that wait."""
        self._wait(is_over, lambda: 0, math.inf)

    def post(self, instance: int, tag: int, content: bytes) -> None:
        """Send a parcel. ValueError: it is too large. It is kept here until it can be sent."""
        if len(content) > PARCEL_BYTES:
            raise ValueError(
                f"got a value of {len(content)} bytes; expected at most {PARCEL_BYTES}"
            )
        with self._state:
            link = self._links[instance]
            link.put(PARCEL, tag, len(content), memoryview(content))
            self._move(link)

    def take(self, instance: int, tag: int, seconds: float) -> bytes:
        """The next parcel of an instance. Raises as `wait`."""
        link = self._links[instance]

        def is_there() -> bool:
            if not link.parcels[tag] and link.problem is not None:
                raise TransferError(link.problem)
            return bool(link.parcels[tag])

        self._wait(is_there, lambda: 0, seconds)
        with self._state:
            return link.parcels[tag].popleft()

    def flush(self, seconds: float) -> None:
        """Wait until everything has left that can. TransferError: not in time."""
        links = self._links.values()
        self._wait(
            lambda: not any(link.queue and not link.is_deaf for link in links), lambda: 0, seconds
        )

    def close(self) -> None:
        """Close the connections."""
        with self._state:
            for link in self._links.values():
                link.end("it was closed")
                link.connection.close()
            self._selector.close()

    def _wait(
        self, is_done: Callable[[], bool], progress: Callable[[], int], seconds: float
    ) -> None:
        with self._state:
            before, deadline = progress(), Deadline(seconds)
            while not is_done():
                if progress() != before:
                    before, deadline = progress(), Deadline(seconds)
                left = deadline.left()
                if left <= 0:
                    raise TransferError(f"timed out after {seconds:g} s")
                if self._is_polled:
                    # another thread moves messages, and says so
                    self._state.wait(min(left, SLICE_SECONDS))
                else:
                    self._poll(min(left, SLICE_SECONDS))

    def _poll(self, seconds: float) -> None:
        """Move what can be moved; if nothing can, wait for that. Other threads may begin messages
        meanwhile.
        """
        self._is_polled = True
        self._state.release()
        try:
            events = self._selector.select(seconds)
        finally:
            self._state.acquire()
            self._is_polled = False
            self._state.notify_all()
        for key, event in events:
            link: Link = key.data
            if event & selectors.EVENT_READ:
                link.take_in()
            self._move(link)

    def _move(self, link: Link) -> None:
        """Send what can be sent, and watch the connection for what it can do next."""
        link.give_out()
        try:
            watched = self._selector.get_key(link.connection).events
        except KeyError:
            return
        if link.problem is not None:
            self._selector.unregister(link.connection)
            self._state.notify_all()
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.queue else 0)
        if wanted != watched:
            self._selector.modify(link.connection, wanted, link)


def _is_done(transfer: Transfer) -> bool:
    link = transfer.link
    if not transfer.is_done and link.problem is not None:
        raise TransferError(link.problem)
    return transfer.is_done
