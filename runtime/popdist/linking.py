"""How the instances of a run connect with each other, once all have met at the store."""

import json
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from poprun import wire
from poprun.interfaces import own_address
from poprun.rendezvous import Rendezvous

from popdist.messages import RING_BYTES, Link

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
    """With each other instance."""
    following: socket.socket
    """To the next instance, for heartbeats."""
    before: socket.socket
    """From the one before."""


def make_listener(rendezvous: Rendezvous, index: int) -> tuple[socket.socket, str]:
    """Where the others connect with this instance. Returns it, and its address in text."""
    if rendezvous.folder is not None:
        return wire.listen(rendezvous.folder / str(index)), str(index)
    assert isinstance(rendezvous.address, tuple)
    listener = wire.listen((own_address(rendezvous.address[0]), 0))
    return listener, json.dumps(listener.getsockname()[:2])


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
    until = time.monotonic() + seconds
    later = set(range(index + 1, len(addresses)))
    reception = _Reception(wire.Gate(listener, rendezvous.secret), rendezvous, later, until)
    reception.start()
    links = {}
    following = (index + 1) % len(addresses)
    try:
        for other in range(index):
            link = _connect(rendezvous, addresses[other], index, MESSAGES, until)
            links[other] = _link_to(rendezvous, link)
        following_heartbeat = _connect(rendezvous, addresses[following], index, HEARTBEAT, until)
    except OSError as error:
        raise LinkError(f"not all could be reached ({error})") from None
    reception.join()
    if reception.missing or reception.before is None:
        waited = ", ".join(map(str, sorted(reception.missing))) or str((index - 1) % len(addresses))
        raise LinkError(f"timed out after {seconds:g} s waiting for instance {waited} to connect")
    return Connections({**links, **reception.links}, following_heartbeat, reception.before)


class _Reception(threading.Thread):
    """Takes the connections of the instances that come later, and of the one before."""

    def __init__(self, gate: wire.Gate, rendezvous: Rendezvous, missing: set[int], until: float):
        super().__init__(name="reception", daemon=True)
        self._gate, self._rendezvous, self._until = gate, rendezvous, until
        self.missing = missing
        self.links: dict[int, Link] = {}
        self.before: socket.socket | None = None

    def run(self) -> None:
        """Until all are here, or the time is over."""
        while (self.missing or self.before is None) and (
            left := self._until - time.monotonic()
        ) > 0:
            visitor = self._gate.admit(left)
            if visitor is not None:
                try:
                    visitor.settimeout(HELLO_SECONDS)
                    self._take(visitor)
                except OSError:
                    visitor.close()  # it is gone again
        self._gate.close()

    def _take(self, visitor: socket.socket) -> None:
        index, kind = HELLO.unpack(wire.receive_exactly(visitor, HELLO.size))
        if kind == HEARTBEAT and self.before is None:
            visitor.settimeout(None)
            self.before = visitor
        elif kind == MESSAGES and index in self.missing:
            self.links[index] = _link_to(self._rendezvous, visitor)
            self.missing.remove(index)
        else:
            visitor.close()


def _connect(
    rendezvous: Rendezvous, text: str, index: int, kind: int, until: float
) -> socket.socket:
    if rendezvous.folder is not None:
        address: wire.Address = rendezvous.folder / text
    else:
        host, port = json.loads(text)
        address = str(host), int(port)
    found = wire.connect(address, rendezvous.secret, until)
    found.sendall(HELLO.pack(index, kind))
    return found


def _link_to(rendezvous: Rendezvous, connection: socket.socket) -> Link:
    """On one machine the two give each other a descriptor of the memory that they share."""
    if rendezvous.folder is None or not hasattr(os, "memfd_create"):
        return Link(connection, None, None)
    own = os.memfd_create("popdist", os.MFD_CLOEXEC)
    try:
        os.ftruncate(own, RING_BYTES)
        outgoing = mmap.mmap(own, RING_BYTES)
        connection.settimeout(HELLO_SECONDS)
        socket.send_fds(connection, [b"+"], [own])
    finally:
        os.close(own)
    _, given, _, _ = socket.recv_fds(connection, 1, 1)
    if not given:
        raise ConnectionResetError("Connection closed by peer")
    try:
        incoming = mmap.mmap(given[0], RING_BYTES, prot=mmap.PROT_READ)
    finally:
        os.close(given[0])
    return Link(connection, outgoing, incoming)
