"""The network interfaces of this machine, and by which of its addresses others reach it."""

import fcntl
import os
import socket
import struct

from poprun.environment import INTERFACE

SIOCGIFADDR = 0x8915
"""ioctl(2), Linux: the address of a network interface."""


def is_loopback(host: str) -> bool:
    """Whether a name stands for this machine, wherever it is used."""
    return host.startswith("127.") or host in ("localhost", "::1")


def own_address(first: str) -> str:
    """This machine's address for others: that of the named interface, or that by which machine 0 is
    reached.
    """
    named = os.environ.get(INTERFACE)
    if named and (address := address_of_interface(named.split(",")[0])) is not None:
        return address
    address = source_address(first) or ""
    if is_loopback(address) and not is_loopback(first):
        # machine 0's own name stands for a loopback address there
        address = socket.gethostbyname(socket.gethostname())
    return address


def source_address(host: str) -> str | None:
    """This machine's address where it talks to a host. None: there is no way to it."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # which sends nothing
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):  # the latter for what is no name of a host, such as a..b
        return None


def address_of_interface(interface: str) -> str | None:
    """Its IPv4 address. None: it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
        except OSError:
            return None


def interface_towards(host: str) -> str | None:
    """The network interface of this machine by which it reaches a host, or that has the host's
    address.

    None where that cannot be told: without IPv4 or Linux, and where a name stands for a loopback
    address, as a machine's own name often does there, while others reach it by another one.
    """
    address = source_address(host)
    if address is None or is_loopback(address) and not is_loopback(host):
        return None
    names = [name for _, name in socket.if_nameindex() if address_of_interface(name) == address]
    return names[0] if names else None


def missing_interfaces() -> list[str]:
    """Network interfaces that the environment names, and that are not there."""
    there = [name for _, name in socket.if_nameindex()]
    return [name for name in os.environ.get(INTERFACE, "").split(",") if name and name not in there]
