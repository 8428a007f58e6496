"""How the instances of a run connect with each other, once all have met at the store.

Each connects with those before it, in their order, and then lets those after it in. So none waits
for one that waits for it.
"""

import os
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from poprun import wire
from poprun.deadline import Deadline
from poprun.environment import INTERFACE
from poprun.interfaces import is_loopback, own_address
from poprun.rendezvous import Rendezvous

from popdist.messages import Link

HELLO = struct.Struct("!Ib")
"""What an instance says first when it has connected: which it is, and what the connection is for at
the other end.
"""
BEFORE, MESSAGES, FOLLOWING = -1, 0, 1
"""The kinds of connections: heartbeats from the instance before, messages, heartbeats to the next.
Of both ends of one, each has the other's kind with the other sign.
"""
HELLO_SECONDS = 5.0
Place = tuple[str, int]
"""A machine, and a port of it: on one machine "", and the instance."""


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


def make_listener(rendezvous: Rendezvous, index: int) -> tuple[socket.socket, Place]:
    """The listener by which the others connect with this instance. Returns it, and its place."""
    if rendezvous.folder is not None:
        return wire.listen(rendezvous.folder / str(index)), ("", index)
    assert isinstance(rendezvous.address, tuple)
    first = rendezvous.address[0]
    own = own_address(first)
    # others know machine 0 by its name, which may stand for a loopback address there
    is_hidden = is_loopback(own) and not (is_loopback(first) or os.environ.get(INTERFACE))
    listener = wire.listen((own, 0), everywhere=is_hidden)
    host, port = listener.getsockname()[:2]
    return listener, (first if is_hidden else host, port)


def link_all(
    rendezvous: Rendezvous,
    index: int,
    listener: socket.socket,
    places: Sequence[Place],
    seconds: float,
) -> Connections:
    """Connect with all other instances. Everyone calls this at the same time.

    Args:
        listener: from `make_listener`.
        places: what that gave each instance.
        seconds: that this may take.
    Raises:
        LinkError: it took longer.
    """
    deadline, count = Deadline(seconds), len(places)
    before, following = ((index - 1) % count, BEFORE), ((index + 1) % count, FOLLOWING)
    ends = {before, following, *((n, MESSAGES) for n in range(count) if n != index)}
    found: dict[tuple[int, int], socket.socket] = {}
    try:
        for other, kind in sorted(end for end in ends if end[0] < index):
            hello = HELLO.pack(index, -kind)
            found[other, kind] = _connect(rendezvous, places[other], hello, deadline)
    except OSError as error:
        raise LinkError(f"not all could be reached ({error})") from None
    gate = wire.Gate(listener, rendezvous.secret)
    while (missing := ends - found.keys()) and deadline.left() > 0:
        visitor = gate.admit(deadline)
        if visitor is not None:
            end = _hear(visitor, Deadline(HELLO_SECONDS, deadline))
            if end in missing:
                found[end] = visitor
            else:
                visitor.close()
    gate.close()
    if missing:
        waited = ", ".join(map(str, sorted({other for other, _ in missing})))
        raise LinkError(f"timed out after {seconds:g} s waiting for instance {waited} to connect")
    links = {n: Link(connection) for (n, kind), connection in found.items() if kind == MESSAGES}
    return Connections(links, found[following], found[before])


def _connect(
    rendezvous: Rendezvous, place: Place, hello: bytes, deadline: Deadline
) -> socket.socket:
    address = place if rendezvous.folder is None else rendezvous.folder / str(place[1])
    found = wire.connect(address, rendezvous.secret, deadline)
    wire.send_all(found, hello, deadline)
    return found


def _hear(visitor: socket.socket, deadline: Deadline) -> tuple[int, int]:
    """The other instance, and the kind of connection; one that there is not where it is gone again,
    or says nothing.
    """
    try:
        index, kind = HELLO.unpack(wire.receive_exactly(visitor, HELLO.size, deadline))
    except OSError:
        return -1, MESSAGES
    return index, kind
