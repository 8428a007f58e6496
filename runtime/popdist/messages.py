"""Messages between instances: bytes from one to another, told apart by a number, their tag.

Each pair has a connection. A long message begins to travel when the receiver has said where its
bytes go (CLEAR), so that none is kept on the way. Short ones are sent at once, and kept until they
are asked for. Messages move while some thread of this process waits for one.

Everything has a fixed form: a header, and as many bytes as it says. Where the two ends do not agree
about a message's size, it fails.
"""

import math
import selectors
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, TypeVar

from poprun.deadline import SLICE_SECONDS, Deadline

HEADER = struct.Struct("<B7xQQ")
"""What follows, the message's tag, a number of bytes."""
CLEAR, WHOLE = 1, 2
"""The receiver is ready; the message."""
SHORT_BYTES, EARLY_BYTES = 2**16, 2**28
"""Messages up to here are short; what is kept of them at the most, from one sender."""
SOCKET_BYTES = 2**20
"""What the system holds of a Unix socket's bytes, where it allows that. The side that writes sleeps
less often.
"""
BUFFERS = 16
"""Buffers given to the system at once."""
CLOSED = "Connection closed by peer"
Queued = TypeVar("Queued")


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
        self.is_done = not len(self.data)

    def move(self, size: int) -> None:
        """Note that so many bytes more have moved."""
        self.moved += size
        self.is_done = self.moved == len(self.data)


class Link:
    """This process's end of the connection with another.

    A tag has a queue only while something is in it, since there are ever new ones.
    """

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        if connection.family == socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        self.connection = connection
        self.queue: deque[tuple[memoryview, Transfer | None]] = deque()
        """What the connection has not taken yet."""
        self.sends: defaultdict[int, deque[Transfer]] = defaultdict(deque)
        """Sends whose receivers are not ready, by tag."""
        self.receives: defaultdict[int, deque[Transfer]] = defaultdict(deque)
        self.ready: defaultdict[int, deque[int]] = defaultdict(deque)
        """Sizes of messages whose receivers are, while we have none to send."""
        self.early: defaultdict[int, deque[bytearray]] = defaultdict(deque)
        """Short messages that nobody has asked for yet."""
        self.early_bytes = 0
        self.problem: str | None = None
        """Why nothing comes any more."""
        self._parts = self._incoming()
        self._target, self._current = next(self._parts)
        """What is filled next, and the transfer that it belongs to."""

    # What comes

    def take_in(self) -> None:
        """Take what has come."""
        try:
            while self.problem is None:
                count = self.connection.recv_into(self._target)
                if not count:
                    return self.end(CLOSED)
                self._target = self._target[count:]
                if self._current is not None:
                    self._current.move(count)
                if not self._target:
                    self._target, self._current = next(self._parts)
        except BlockingIOError:
            return
        except (OSError, TransferError) as error:
            self.end(getattr(error, "strerror", None) or str(error))

    def _incoming(self) -> Iterator[tuple[memoryview, Transfer | None]]:
        """What is to be filled with what comes, one after the other."""
        header = memoryview(bytearray(HEADER.size))
        while True:
            yield header, None
            kind, tag, size = HEADER.unpack(header)
            if kind == CLEAR:
                self.ready[tag].append(size)
                self._match(tag)
            elif kind == WHOLE and tag in self.receives:
                transfer = self._receiver(tag, size)
                yield transfer.data, transfer
            elif kind == WHOLE and 0 < size <= SHORT_BYTES and self.early_bytes < EARLY_BYTES:
                self.early_bytes += size
                content = bytearray(size)
                yield memoryview(content), None
                self.early[tag].append(content)
                self._hand_over(tag)
            else:
                raise TransferError(
                    f"got a message of kind {kind} with {size} bytes, which was not expected"
                )

    def _receiver(self, tag: int, size: int) -> Transfer:
        """The receiver of the message that begins."""
        transfer = _next(self.receives, tag)
        if size != len(transfer.data):
            raise TransferError(f"got a message of {size} bytes; expected {len(transfer.data)}")
        return transfer

    def receive(self, transfer: Transfer) -> None:
        """Be ready for a message."""
        self.receives[transfer.tag].append(transfer)
        self._hand_over(transfer.tag)
        if len(transfer.data) > SHORT_BYTES:
            self._put(CLEAR, transfer.tag, len(transfer.data))

    def _hand_over(self, tag: int) -> None:
        """Give what came early to who asks for it."""
        while tag in self.early and tag in self.receives:
            content = _next(self.early, tag)
            self.early_bytes -= len(content)
            transfer = self._receiver(tag, len(content))
            transfer.data[:] = content
            transfer.move(len(content))

    # What goes

    def send(self, transfer: Transfer) -> None:
        """Send a message, a long one once its receiver is ready."""
        if len(transfer.data) <= SHORT_BYTES:
            return self._put(WHOLE, transfer.tag, len(transfer.data), transfer)
        self.sends[transfer.tag].append(transfer)
        self._match(transfer.tag)

    def _match(self, tag: int) -> None:
        while tag in self.ready and tag in self.sends:
            transfer, size = _next(self.sends, tag), _next(self.ready, tag)
            if size != len(transfer.data):
                raise TransferError(
                    f"got room for {size} bytes; expected it for {len(transfer.data)}"
                )
            self._put(WHOLE, tag, size, transfer)

    def _put(self, kind: int, tag: int, size: int, transfer: Transfer | None = None) -> None:
        """Queue a header, and the message that follows it."""
        self.queue.append((memoryview(HEADER.pack(kind, tag, size)), None))
        if transfer is not None:
            self.queue.append((transfer.data, transfer))

    def give_out(self) -> None:
        """Send what can be sent without waiting."""
        try:
            while self.queue:
                parts = [data for data, _ in islice(self.queue, BUFFERS)]
                self._sent(self.connection.sendmsg(parts))
        except BlockingIOError:
            return
        except OSError:
            self.queue.clear()  # what has come is still there to be read, up to its end

    def _sent(self, count: int) -> None:
        while count:
            data, transfer = self.queue.popleft()
            part = min(count, len(data))
            if transfer is not None:
                transfer.move(part)
            count -= part
            if part < len(data):
                self.queue.appendleft((data[part:], transfer))

    def end(self, problem: str) -> None:
        """Neither send nor receive any more."""
        self.problem = problem
        self.queue.clear()


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
        return self._begin(Transfer(self._links[instance], tag, data), Link.send)

    def receive(self, instance: int, tag: int, data: Any) -> Transfer:
        """Begin to receive into a buffer."""
        return self._begin(Transfer(self._links[instance], tag, data), Link.receive)

    def _begin(self, transfer: Transfer, what: Callable[[Link, Transfer], None]) -> Transfer:
        with self._state:
            if not transfer.is_done:
                try:
                    what(transfer.link, transfer)
                except TransferError as error:
                    transfer.link.end(str(error))
                self._move(transfer.link)
        return transfer

    def wait(self, transfers: Sequence[Transfer], seconds: float) -> None:
        """Wait until all are done.

        Raises:
            TransferError: one of the other ends is gone, or nothing moved for so many seconds.
        """
        self._wait(
            lambda: all([_is_done(transfer) for transfer in transfers]),  # one may have failed
            lambda: sum(transfer.moved for transfer in transfers),
            seconds,
        )

    def move(self, is_over: Callable[[], bool]) -> None:
        """Move messages until something holds: for a thread beside those that wait."""
        self._wait(is_over, lambda: 0, math.inf)

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
        with suppress(KeyError):  # it has ended before
            watched = self._selector.get_key(link.connection).events
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.queue else 0)
            if link.problem is not None:
                self._selector.unregister(link.connection)
                self._state.notify_all()
            elif wanted != watched:
                self._selector.modify(link.connection, wanted, link)


def _next(queues: dict[int, deque[Queued]], tag: int) -> Queued:
    """The first in a tag's queue, which is taken from it."""
    queue = queues[tag]
    found = queue.popleft()
    if not queue:
        del queues[tag]
    return found


def _is_done(transfer: Transfer) -> bool:
    link = transfer.link
    if not transfer.is_done and link.problem is not None:
        raise TransferError(link.problem)
    return transfer.is_done
