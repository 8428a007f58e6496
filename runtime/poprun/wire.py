"""Connections between the processes of a run: none is read from before it is known who is at its
other end.

On one machine they are Unix sockets in a folder that only this user can enter, and the system says
which user the other process belongs to. Between machines they are TCP sockets, and both ends prove
that they know the run's secret, without telling it: each answers a random challenge with its
HMAC-SHA256. Up to there exactly so many bytes are taken, within `HANDSHAKE_SECONDS`, and nothing is
made of them but a comparison. The end that listens says last that it has let the other one in.

What waits at a connection waits here, by a `Deadline`: for as many bytes as are asked for, however
they come.
"""

import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import EADDRNOTAVAIL, EINPROGRESS
from pathlib import Path
from typing import Any, TypeVar

from poprun.deadline import SLICE_SECONDS, Deadline
from poprun.interfaces import is_loopback

T = TypeVar("T")
Address = Path | tuple[str, int]
"""A socket in a folder, or host and port."""

HANDSHAKE_SECONDS = 5.0
"""Seconds for all that a stranger has to say."""
STRANGERS = 64
"""Connections that have not said who they are; of more, the oldest are closed."""
CONNECT_SECONDS, RETRY_SECONDS = 5.0, 0.05
"""An attempt to connect, and from one to the next."""
NONCE = 32
"""Bytes of a challenge, and of an answer."""
MAGIC, WELCOME = b"popdist2", b"+"
USER = struct.Struct("3i")
"""Process, user and group of a Unix socket's other end: SO_PEERCRED, Linux."""


class Unreachable(ConnectionError):
    """Nobody of this run could be reached there; the text says why, in a few words."""


class Stranger(Unreachable):
    """Something is there that does not belong to this run."""


class _LookUpTimeout(TimeoutError):
    """The look-up of a name did not end in time."""


def listen(address: Address, everywhere: bool = False) -> socket.socket:
    """A socket that others can connect to. OSError: the address is in use, or is not this
    machine's.

    Args:
        everywhere: at all of this machine's addresses of that kind, at the same port.
    """
    if isinstance(address, Path):
        address.unlink(missing_ok=True)  # of a run that was killed
        found = socket.socket(socket.AF_UNIX)
        with _short(address) as name:
            found.bind(name)
    else:
        family, place = _resolved(address)[0]
        if everywhere:
            place = "", address[1]
        found = socket.socket(family)
        # a port that was just closed is free
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind(place)
        except OSError:
            found.close()
            raise
    found.listen(socket.SOMAXCONN)
    return found


def listen_for_others(address: Address) -> socket.socket:
    """The same as `listen`, at machine 0's address, which may be one that only others know it by:
    its own name often stands for a loopback address there, or the address is that of a router
    before it.
    """
    if isinstance(address, Path):
        return listen(address)
    is_hidden = not is_loopback(address[0]) and is_loopback(_resolved(address)[0][1][0])
    try:
        return listen(address, everywhere=is_hidden)
    except OSError as error:
        if error.errno != EADDRNOTAVAIL:
            raise
        return listen(address, everywhere=True)


def connect(address: Address, secret: bytes | None, deadline: Deadline) -> socket.socket:
    """Connect, trying again until then, and make sure who is there.

    Raises:
        Unreachable: nobody was.
    """
    problem = ""
    while True:
        try:
            return _connect(address, secret, deadline)
        except Stranger:
            raise
        except TimeoutError as error:
            if deadline.left() > 0 or not problem:  # the last attempt may have had no time
                is_unknown = isinstance(error, _LookUpTimeout)
                problem = str(error) if is_unknown else "what listens there says nothing"
        except OSError as error:
            problem = error.strerror or str(error)
        if deadline.left() <= 0:
            raise Unreachable(problem)
        time.sleep(RETRY_SECONDS)


def _connect(address: Address, secret: bytes | None, within: Deadline) -> socket.socket:
    if isinstance(address, Path):
        return _connect_to(socket.AF_UNIX, address, secret, within)
    try:
        places = within.run(_resolved, address)
    except TimeoutError:
        raise _LookUpTimeout("its name is still being looked up") from None
    problem = None
    for family, place in places:
        try:
            return _connect_to(family, place, secret, within)
        except Stranger:
            raise
        except OSError as error:
            problem = problem or error  # the system puts first what it takes for the best
    assert problem is not None, "a name that is known has an address"
    raise problem


def _connect_to(
    family: int, place: Address, secret: bytes | None, within: Deadline
) -> socket.socket:
    deadline = Deadline(CONNECT_SECONDS, within)
    found = socket.socket(family)
    try:
        if isinstance(place, Path):
            with _short(place) as name:
                _reach(found, name, deadline)
            check_user(found)
        else:
            _reach(found, place, deadline)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            assert secret is not None
            _introduce(found, secret, Deadline(HANDSHAKE_SECONDS, within))
    except BaseException:
        found.close()
        raise
    return found


def _reach(connection: socket.socket, place: Any, deadline: Deadline) -> None:
    """Connect. OSError: that is not possible, or not in time."""
    connection.setblocking(False)
    problem = connection.connect_ex(place)
    if problem == EINPROGRESS:
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_WRITE)
            while not selector.select(deadline.slice()):
                pass
        problem = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if problem:
        raise OSError(problem, os.strerror(problem))


def _introduce(connection: socket.socket, secret: bytes, deadline: Deadline) -> None:
    """The part of the end that has connected: challenge, check the answer, answer, and wait until
    that is taken: who was refused meanwhile can try again.
    """
    own = secrets.token_bytes(NONCE)
    send_all(connection, MAGIC + own, deadline)
    told = receive_exactly(connection, 2 * NONCE, deadline)
    theirs, proof = told[:NONCE], told[NONCE:]
    if not hmac.compare_digest(proof, _proof(secret, b"listens", own, theirs)):
        raise Stranger("what listens there does not know this run's secret, or not the same")
    send_all(connection, _proof(secret, b"connects", theirs, own), deadline)
    receive_exactly(connection, len(WELCOME), deadline)


def _proof(secret: bytes, role: bytes, challenge: bytes, own: bytes) -> bytes:
    return hmac.digest(secret, MAGIC + role + challenge + own, "sha256")


def check_user(connection: socket.socket) -> None:
    """Stranger: the process at the other end of a Unix socket belongs to another user, who is not
    root.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return  # the folder's mode has to do
    _, user, _ = USER.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, USER.size)
    )
    if user not in (os.getuid(), 0):
        raise Stranger(f"the process there belongs to user {user}")


def _resolved(address: tuple[str, int]) -> list[tuple[int, tuple[str, int]]]:
    """The family and the place of each address that a name has."""
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except UnicodeError:  # no name of a host, such as a..b
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known") from None
    return [(family, place) for family, _, _, _, place in found]  # type: ignore[misc]


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name for a socket's file. The system takes about a hundred bytes, whatever folder it is
    in.
    """
    if len(os.fsencode(path)) < 100 or not os.path.exists("/proc/self/fd"):
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class _Visitor:
    """A connection that has not said yet who it is."""

    def __init__(self) -> None:
        self.deadline = Deadline(HANDSHAKE_SECONDS)
        self.said = b""
        self.expected = b""
        """The answer to our challenge, once that is sent."""


class Gate:
    """Lets connections in that know the secret, or belong to this user. None can keep others
    waiting.

    Args:
        listener: it belongs to the gate from now on.
        secret: None: of a Unix socket.
    """

    def __init__(self, listener: socket.socket, secret: bytes | None):
        self._listener, self._secret = listener, secret
        self._selector = selectors.DefaultSelector()
        self._visitors: dict[socket.socket, _Visitor] = {}
        """The oldest first."""
        self._admitted: deque[socket.socket] = deque()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def admit(self, deadline: Deadline) -> socket.socket | None:
        """The next one that is let in; None: there was none in time."""
        while not self._admitted:
            left = deadline.left()
            if left <= 0:
                return None
            for key, _ in self._selector.select(min(left, SLICE_SECONDS)):
                if key.fileobj is self._listener:
                    self._open()
                else:
                    self._hear(key.fileobj)  # type: ignore[arg-type]
            for visitor in [v for v, state in self._visitors.items() if state.deadline.left() <= 0]:
                self._refuse(visitor)
        return self._admitted.popleft()

    def close(self) -> None:
        """Let nobody in any more."""
        for visitor in list(self._visitors):
            self._refuse(visitor)
        self._selector.close()
        self._listener.close()

    def _open(self) -> None:
        try:
            visitor, _ = self._listener.accept()
        except OSError:
            time.sleep(1e-3)  # it is gone again, or this process has no descriptors left
            return
        if self._secret is None:
            try:
                check_user(visitor)
            except Stranger:
                visitor.close()
            else:
                self._admitted.append(visitor)
            return
        visitor.setblocking(False)
        self._visitors[visitor] = _Visitor()
        self._selector.register(visitor, selectors.EVENT_READ)
        if len(self._visitors) > STRANGERS:
            self._refuse(next(iter(self._visitors)))

    def _hear(self, visitor: socket.socket) -> None:
        state = self._visitors.get(visitor)
        if state is None:
            return  # it was refused meanwhile
        size = NONCE if state.expected else len(MAGIC) + NONCE
        try:
            part = visitor.recv(size - len(state.said))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        state.said += part
        if not part:
            self._refuse(visitor)
        elif len(state.said) == size:
            self._answer(visitor, state)

    def _answer(self, visitor: socket.socket, state: _Visitor) -> None:
        said, state.said, secret = state.said, b"", self._secret
        assert secret is not None
        if state.expected:
            if not hmac.compare_digest(said, state.expected):
                return self._refuse(visitor)
            return self._welcome(visitor)
        if not said.startswith(MAGIC):
            return self._refuse(visitor)
        theirs, own = said[len(MAGIC) :], secrets.token_bytes(NONCE)
        state.expected = _proof(secret, b"connects", own, theirs)
        try:
            visitor.sendall(own + _proof(secret, b"listens", theirs, own))  # it always fits
        except OSError:
            self._refuse(visitor)

    def _welcome(self, visitor: socket.socket) -> None:
        try:
            visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            visitor.sendall(WELCOME)  # it always fits
        except OSError:
            return self._refuse(visitor)  # it is gone again
        self._forget(visitor)
        self._admitted.append(visitor)

    def _forget(self, visitor: socket.socket) -> None:
        del self._visitors[visitor]
        self._selector.unregister(visitor)

    def _refuse(self, visitor: socket.socket) -> None:
        self._forget(visitor)
        visitor.close()


def in_time(
    connection: socket.socket, deadline: Deadline | None, work: Callable[..., T], *arguments: Any
) -> T:
    """What a function returns that waits for a connection. TimeoutError: not in time; None: it may
    take for ever.
    """
    while True:
        connection.settimeout(None if deadline is None else deadline.slice())
        try:
            return work(*arguments)
        except TimeoutError as error:
            if error.errno is not None:
                raise  # the system's, which has given the connection up


def receive_exactly(
    connection: socket.socket, size: int, deadline: Deadline | None = None
) -> bytes:
    """So many bytes, all of them in time. ConnectionError: the other end has closed it."""
    found = bytearray(size)
    view = memoryview(found)
    while view:
        count = in_time(connection, deadline, connection.recv_into, view)
        if not count:
            raise ConnectionResetError(None, "the other end ended the connection")
        view = view[count:]
    return bytes(found)


def send_all(connection: socket.socket, data: bytes, deadline: Deadline | None = None) -> None:
    """Send all bytes, in time."""
    view = memoryview(data)
    while view:
        view = view[in_time(connection, deadline, connection.send, view) :]
