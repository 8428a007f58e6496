"""How the instances of a run connect with each other, once all have met at the store."""

import json
import os
import socket
import struct
import threading
from collections.abc import Sequence
from typing import NamedTuple

from poprun import wire
from poprun.deadline import Deadline
from poprun.environment import INTERFACE
from poprun.interfaces import is_loopback, own_address
from poprun.rendezvous import Rendezvous

from popdist.messages import Link

HELLO = struct.Struct("!IB")
"""What an instance says first when it has connected: which it is, and what the connection is
for.
"""
MESSAGES, HEARTBEAT = 0, 1
HELLO_SECONDS = 5.0


class LinkError(RuntimeError):
    """Instances that have met did not connect with each other in time."""


class Connections(NamedTuple):
    """What an instance has when all have connected."""

    links: dict[int, Link]
    """The link with each other instance."""
    following: socket.socket
    """The link to the next instance, for heartbeats."""
    before: socket.socket
    """The link from the instance before."""


def make_listener(rendezvous: Rendezvous, index: int) -> tuple[socket.socket, str]:
    """The listener by which the others connect with this instance. Returns it, and its address in
    text: of a machine, and there.
    """
    if rendezvous.folder is not None:
        return wire.listen(rendezvous.folder / str(index)), json.dumps(["", index])
    assert isinstance(rendezvous.address, tuple)
    first = rendezvous.address[0]
    own = own_address(first)
    # others know machine 0 by its name, which may stand for a loopback address there
    is_hidden = is_loopback(own) and not (is_loopback(first) or os.environ.get(INTERFACE))
    listener = wire.listen((own, 0), everywhere=is_hidden)
    host, port = listener.getsockname()[:2]
    return listener, json.dumps([first if is_hidden else host, port])


def machine_of(address: str) -> str:
    """The machine in an address of `make_listener`."""
    return str(json.loads(address)[0])


def link_all(
    rendezvous: Rendezvous,
    index: int,
    listener: socket.socket,
    addresses: Sequence[str],
    seconds: float,
) -> Connections:
    """Connect with all other instances. Everyone calls this at the same time.

    Args:
        listener: from `make_listener`.
        addresses: what that gave each instance.
        seconds: that this may take.
    Raises:
        LinkError: it took longer.
    """
    deadline = Deadline(seconds)
    later = set(range(index + 1, len(addresses)))
    reception = _Reception(wire.Gate(listener, rendezvous.secret), rendezvous, later, seconds)
    reception.start()
    links = {}
    following = (index + 1) % len(addresses)
    try:
        for other in range(index):
            links[other] = Link(_connect(rendezvous, addresses[other], index, MESSAGES, deadline))
        following_heartbeat = _connect(rendezvous, addresses[following], index, HEARTBEAT, deadline)
    except OSError as error:
        raise LinkError(f"not all could be reached ({error})") from None
    reception.join()  # it ends by the same limit
    if reception.missing or reception.before is None:
        waited = ", ".join(map(str, sorted(reception.missing))) or str((index - 1) % len(addresses))
        raise LinkError(f"timed out after {seconds:g} s waiting for instance {waited} to connect")
    return Connections({**links, **reception.links}, following_heartbeat, reception.before)


class _Reception(threading.Thread):
    """Takes the connections of the instances that come later, and of the one before."""

    def __init__(self, gate: wire.Gate, rendezvous: Rendezvous, missing: set[int], seconds: float):
        super().__init__(name="reception", daemon=True)
        self._gate, self._rendezvous, self._seconds = gate, rendezvous, seconds
        self.missing = missing
        self.links: dict[int, Link] = {}
        self.before: socket.socket | None = None

    def run(self) -> None:
        """Link instances until all are here, or the time is over."""
        deadline = Deadline(self._seconds)
        while (self.missing or self.before is None) and deadline.left() > 0:
            visitor = self._gate.admit(deadline)
            if visitor is not None:
                try:
                    self._take(visitor, Deadline(HELLO_SECONDS, deadline))
                except OSError:
                    visitor.close()  # it is gone again
        self._gate.close()

    def _take(self, visitor: socket.socket, deadline: Deadline) -> None:
        index, kind = HELLO.unpack(wire.receive_exactly(visitor, HELLO.size, deadline))
        if kind == HEARTBEAT and self.before is None:
            self.before = visitor
        elif kind == MESSAGES and index in self.missing:
            self.links[index] = Link(visitor)
            self.missing.remove(index)
        else:
            visitor.close()


def _connect(
    rendezvous: Rendezvous, text: str, index: int, kind: int, deadline: Deadline
) -> socket.socket:
    host, place = json.loads(text)
    folder = rendezvous.folder
    address = (str(host), int(place)) if folder is None else folder / str(int(place))
    found = wire.connect(address, rendezvous.secret, deadline)
    wire.send_all(found, HELLO.pack(index, kind), deadline)
    return found
