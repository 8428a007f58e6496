"""Keys and values that all processes of a run see: one of them keeps them, the others ask.

Requests and answers have a fixed form: numbers and sizes, then the key, then the value, which are
bytes and are looked at no further. Whoever can ask has shown who it is, see `wire`.
"""

import socket
import struct
import threading

from poprun import wire
from poprun.deadline import SLICE_SECONDS, Deadline

REQUEST = struct.Struct("!BHId")
"""What, bytes of the key and of the value, seconds to wait for the key."""
ANSWER = struct.Struct("!BI")
"""Whether it was found, bytes of the value."""
VALUE_BYTES = 2**24
"""More are refused."""
KEY_BYTES = 2**16 - 1
SET, GET, CHECK, ADD, REPLACE, DELETE, COUNT = range(7)
ANSWER_SECONDS = 30.0
"""How long an answer may take, beside the wait for a key, which is asked for in slices."""
GATE_SECONDS = 0.5
"""How soon the keeper notices that it is to end."""


class StoreError(RuntimeError):
    """The process that keeps the values does not answer any more, or a value did not come in
    time.
    """


class Keeper:
    """Keeps them, in threads of this process, until it ends or `close` is called.

    Args:
        listener, secret: of the `wire.Gate`.
    """

    def __init__(self, listener: socket.socket, secret: bytes | None):
        self._gate = wire.Gate(listener, secret)
        self._values: dict[bytes, bytes] = {}
        self._changed = threading.Condition()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._let_in, name="store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let nobody in any more."""
        self._is_over.set()
        self._thread.join()

    def _let_in(self) -> None:
        while not self._is_over.is_set():
            member = self._gate.admit(Deadline(GATE_SECONDS))
            if member is not None:
                threading.Thread(
                    target=self._serve, args=(member,), name="store", daemon=True
                ).start()
        self._gate.close()

    def _serve(self, member: socket.socket) -> None:
        with member:
            try:
                while True:
                    what, key_size, size, seconds = REQUEST.unpack(
                        wire.receive_exactly(member, REQUEST.size)
                    )
                    if size > VALUE_BYTES or what > COUNT:
                        return
                    key, value = (
                        wire.receive_exactly(member, key_size),
                        wire.receive_exactly(member, size),
                    )
                    found = self._do(what, key, value, seconds)
                    answer = ANSWER.pack(found is not None, len(found or b"")) + (found or b"")
                    wire.send_all(member, answer)
            except (OSError, ValueError):
                return  # it has ended

    def _do(self, what: int, key: bytes, value: bytes, seconds: float) -> bytes | None:
        values = self._values
        with self._changed:
            if what == GET:
                self._changed.wait_for(lambda: key in values, max(0.0, min(seconds, SLICE_SECONDS)))
                return values.get(key)
            if what == CHECK:
                return b"" if key in values else None
            if what == COUNT:
                return b"%d" % len(values)
            if what == DELETE:
                return values.pop(key, None)
            if what == ADD:
                value = b"%d" % (int(values.get(key, b"0")) + int(value))
            elif what == REPLACE:  # the value's first half, behind its size, is what must be there
                size = int.from_bytes(value[:4], "big")
                expected, value = value[4 : 4 + size], value[4 + size :]
                if values.get(key, b"") != expected:
                    return values.get(key, expected)
            values[key] = value
            self._changed.notify_all()
            return value if what != SET else b""


class Client:
    """Asks the keeper, over a connection of its own. Threads take turns.

    Args:
        seconds: that `get` waits for a value.
    """

    def __init__(self, connection: socket.socket, seconds: float):
        self._connection, self._seconds = connection, seconds
        self._turn = threading.Lock()
        self._problem: str | None = None
        """Why it can be asked no more: an answer that came late would be taken for the next one."""

    def set(self, key: str, value: str | bytes) -> None:
        """Give a key its value."""
        self._ask(SET, key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str, deadline: Deadline | None = None) -> bytes:
        """A key's value, once it has one. StoreError: not in time."""
        deadline = deadline or Deadline(self._seconds)
        left = deadline.left()
        while (found := self._ask(GET, key, b"", min(max(left, 0.0), SLICE_SECONDS))) is None:
            left = deadline.left()
            if left <= 0:
                raise StoreError(f"timed out after {deadline.seconds:g} s waiting for {key}")
        return found

    def has(self, key: str) -> bool:
        """Whether a key has a value."""
        return self._ask(CHECK, key) is not None

    def add(self, key: str, amount: int) -> int:
        """Add to a key's number, which begins with 0. Returns the sum."""
        return int(self._ask(ADD, key, b"%d" % amount) or 0)

    def replace(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Give a key its value where the present one is as expected, or b"" and there is none.
        Returns what it has.
        """
        return self._ask(REPLACE, key, len(expected).to_bytes(4, "big") + expected + value) or b""

    def delete(self, key: str) -> bool:
        """Forget a key. Returns whether there was one."""
        return self._ask(DELETE, key) is not None

    def count(self) -> int:
        """Number of keys."""
        return int(self._ask(COUNT, "") or 0)

    def close(self) -> None:
        """Ask no more."""
        self._connection.close()

    def _ask(self, what: int, key: str, value: bytes = b"", seconds: float = 0.0) -> bytes | None:
        if len(value) > VALUE_BYTES:
            raise StoreError(f"got {len(value)} bytes for {key}; expected at most {VALUE_BYTES}")
        name = key.encode()
        if len(name) > KEY_BYTES:
            raise StoreError(f"got a key of {len(name)} bytes; expected at most {KEY_BYTES}")
        with self._turn:
            if self._problem is not None:
                raise StoreError(self._problem)
            try:
                return self._answer(what, name, value, seconds)
            except BaseException as error:
                told = getattr(error, "strerror", None)
                self._problem = told or str(error) or type(error).__name__
                self._connection.close()
                if isinstance(error, OSError):
                    raise StoreError(self._problem) from None
                raise

    def _answer(self, what: int, name: bytes, value: bytes, seconds: float) -> bytes | None:
        connection, deadline = self._connection, Deadline(seconds + ANSWER_SECONDS)
        request = REQUEST.pack(what, len(name), len(value), seconds) + name + value
        wire.send_all(connection, request, deadline)
        head = wire.receive_exactly(connection, ANSWER.size, deadline)
        is_found, size = ANSWER.unpack(head)
        if size > VALUE_BYTES:
            raise ConnectionError("an answer is too large")
        found = wire.receive_exactly(connection, size, deadline)
        return found if is_found else None


def connect(address: wire.Address, secret: bytes | None, deadline: Deadline) -> Client:
    """Connect to the keeper, once it is there. wire.Unreachable: not in time."""
    return Client(wire.connect(address, secret, deadline), deadline.seconds)
