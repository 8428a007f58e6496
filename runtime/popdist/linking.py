"""How the instances of a run connect with each other, once all have met at the store."""

import fcntl
import json
import mmap
import os
import socket
import struct
import threading
import time
from typing import Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from popdist import wire
from popdist.meeting import Meeting, is_loopback
from popdist.messages import RING_BYTES, Link

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable: the network interface by which other instances are reached; the launcher
sets it, too.
"""
HELLO = struct.Struct("!IB")
"""What an instance says first when it has connected: which it is, and what the connection is
for.
"""
MESSAGES, PULSE = 0, 1
HELLO_SECONDS = 5.0
SIOCGIFADDR = 0x8915
"""ioctl(2), Linux: the address of a network interface."""


class LinkError(RuntimeError):
    """Instances that have met did not connect with each other in time."""


class Connections(NamedTuple):
    """What an instance has when all have connected."""

    links: Dict[int, Link]
    """With each other instance."""
    following: socket.socket
    """To the next instance, for signs of life."""
    before: socket.socket
    """From the one before."""


def make_listener(meeting: Meeting, index: int) -> Tuple[socket.socket, str]:
    """Where the others connect with this instance. Returns it, and its address in text."""
    if meeting.folder is not None:
        return wire.listen(meeting.folder / str(index)), str(index)
    assert isinstance(meeting.address, tuple)
    listener = wire.listen((own_address(meeting.address), 0))
    return listener, json.dumps(listener.getsockname()[:2])


def own_address(first: Tuple[str, int]) -> str:
    """This machine's address for others: that of the named interface, or that by which machine 0 is
    reached.
    """
    named = os.environ.get(INTERFACE)
    if named and (address := address_of_interface(named.split(",")[0])) is not None:
        return address
    address = source_address(first[0]) or ""
    if is_loopback(address) and not is_loopback(first[0]):
        # machine 0's own name stands for a loopback address there
        address = socket.gethostbyname(socket.gethostname())
    return address


def source_address(host: str) -> Optional[str]:
    """This machine's address where it talks to a host. None: there is no way to it."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # which sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def address_of_interface(interface: str) -> Optional[str]:
    """Its IPv4 address. None: it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
        except OSError:
            return None


def link_all(
    meeting: Meeting, index: int, listener: socket.socket, addresses: Sequence[str], seconds: float
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
    reception = _Reception(wire.Gate(listener, meeting.secret), meeting, later, until)
    reception.start()
    links = {}
    following = (index + 1) % len(addresses)
    try:
        for other in range(index):
            link = _connect(meeting, addresses[other], index, MESSAGES, until)
            links[other] = _link_to(meeting, link)
        pulse = _connect(meeting, addresses[following], index, PULSE, until)
    except OSError as error:
        raise LinkError(f"not all could be reached ({error})") from None
    reception.join()
    if reception.missing or reception.before is None:
        waited = ", ".join(map(str, sorted(reception.missing))) or str((index - 1) % len(addresses))
        raise LinkError(f"timed out after {seconds:g} s waiting for instance {waited} to connect")
    return Connections({**links, **reception.links}, pulse, reception.before)


class _Reception(threading.Thread):
    """Takes the connections of the instances that come later, and of the one before."""

    def __init__(self, gate: wire.Gate, meeting: Meeting, missing: Set[int], until: float):
        super().__init__(name="reception", daemon=True)
        self._gate, self._meeting, self._until = gate, meeting, until
        self.missing = missing
        self.links: Dict[int, Link] = {}
        self.before: Optional[socket.socket] = None

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
        if kind == PULSE and self.before is None:
            visitor.settimeout(None)
            self.before = visitor
        elif kind == MESSAGES and index in self.missing:
            self.links[index] = _link_to(self._meeting, visitor)
            self.missing.remove(index)
        else:
            visitor.close()


def _connect(meeting: Meeting, text: str, index: int, kind: int, until: float) -> socket.socket:
    if meeting.folder is not None:
        address: wire.Address = meeting.folder / text
    else:
        host, port = json.loads(text)
        address = str(host), int(port)
    found = wire.connect(address, meeting.secret, until)
    found.sendall(HELLO.pack(index, kind))
    return found


def _link_to(meeting: Meeting, connection: socket.socket) -> Link:
    """On one machine the two give each other a descriptor of the memory that they share."""
    if meeting.folder is None or not hasattr(os, "memfd_create"):
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


def missing_interfaces() -> List[str]:
    """Network interfaces that the environment names, and that are not there."""
    there = [name for _, name in socket.if_nameindex()]
    return [name for name in os.environ.get(INTERFACE, "").split(",") if name and name not in there]
