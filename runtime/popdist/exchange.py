"""What the processes of a run tell each other on the host: barriers, and small values gathered.

`messages` carry it. Every function here is collective: all instances call it, in the same order.
Nothing that comes from another process is executed: values travel as JSON, tensors as bytes.
"""

import atexit
import hashlib
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import zip_longest
from typing import Any, NamedTuple

from poprun import rendezvous, store, wire
from poprun.deadline import Deadline
from poprun.environment import INTERFACE, SECONDS, TIMEOUT, number_from_environment
from poprun.hang_report import HangReport, own_name, waiting
from poprun.heartbeat import InstanceHeartbeat
from poprun.interfaces import missing_interfaces
from poprun.rendezvous import Rendezvous

from popdist.environment import getInstanceIndex, getNumInstances, getNumTotalReplicas
from popdist.linking import LinkError, Place, link_all, make_listener
from popdist.messages import Messages, TransferError

PATIENT_SECONDS = 3600
"""Seconds that others wait at a collective, while one instance does what only it does, such as
writing files.
"""
SILENT_SECONDS = 10
"""How much longer than at a collective an instance may be silent altogether: what waits there can
say more.
"""
AFTERMATH_SECONDS = 3.0
"""An instance that lost another waits so long before it says so: the other's own error comes first,
and alone where the launcher ends the run meanwhile."""
VALUE_BYTES = 2**26
"""The largest value of `gather`, as text."""
LATE = re.compile("timed? ?out", re.IGNORECASE)
"""The words of the transport's errors where nobody came in time."""
GATHER, PATIENT, BESIDE = 2**62, 2**62 + 1, 2**62 + 3
"""Tags of values: of the kinds of gathers, which different threads may call."""
BROADCAST = 2**62 + 2


class InstanceError(RuntimeError):
    """Another instance is gone, or does not answer."""


class Connection(NamedTuple):
    """This process's connections to all others."""

    rendezvous: Rendezvous
    messages: Messages
    machines: list[str]
    """The machine of each instance."""


_connection: Connection | None = None
_hang_report: HangReport | None = None
"""The hang report, from when all instances have come."""
_lost: list[InstanceError] = []
"""The errors of instances that are gone or do not answer."""


def init() -> None:
    """Start communication between the instances; with one there is nothing to start. A Session does
    it, too.

    Raises:
        RuntimeError, ValueError: the launcher's environment is half set, or wrong.
    """
    getInstanceIndex()
    getNumTotalReplicas()
    seconds()
    if getNumInstances() > 1:
        connect()


def seconds() -> int:
    """How long an instance waits for others at a collective. ValueError if the variable is no
    positive number.
    """
    found = number_from_environment(TIMEOUT, SECONDS)
    if found < 1:
        raise ValueError(
            f"environment variable {TIMEOUT}: got {found}; expected at least 1 second."
        )
    return found


def connect() -> Connection:
    """Open the connections of this process, once.

    Raises:
        RuntimeError: the launcher's address is missing, or its port is in use.
        InstanceError: not all instances came in time.
    """
    global _connection
    if _connection is None:
        with _ended_by_ctrl_c():
            _connection = _open(getInstanceIndex(), getNumInstances())
    return _connection


def machines() -> list[str]:
    """The machine of each instance, as the same list in all: the address by which the others reach
    it there.
    """
    return [""] if getNumInstances() == 1 else connect().machines


@contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the process in the body, without a word: nothing has begun."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _open(index: int, instances: int) -> Connection:
    global _hang_report
    point = rendezvous.find(index)
    _check_interface()
    if point.keeps_store:
        _keep_store(point)
    wait = max(rendezvous.JOIN_SECONDS, seconds())
    values = _reach(point, index, instances, wait)
    listener, place = make_listener(point, index)
    names, places = zip(*_meet(values, index, instances, place, wait))
    _hang_report = HangReport(values, index, names)
    atexit.register(_hang_report.stop)
    silence = seconds() + SILENT_SECONDS
    interface = os.environ.get(INTERFACE, "unset: the address that reaches machine 0 is taken")
    with reaching_others(f"opening connections ({INTERFACE} is {interface})", LinkError):
        connections = link_all(point, index, listener, places, seconds())
    heartbeat = InstanceHeartbeat(connections.following, connections.before, index, names, silence)
    messages = Messages(connections.links)
    atexit.register(messages.close)
    atexit.register(heartbeat.stop)  # before
    return Connection(point, messages, [machine for machine, _ in places])


def _check_interface() -> None:
    """RuntimeError if the network interface that the environment names is not there."""
    if missing := missing_interfaces():
        raise RuntimeError(
            f"environment variable {INTERFACE}: got {missing[0]!r}; expected a network interface "
            f"of this machine, of {', '.join(name for _, name in socket.if_nameindex())}. Correct "
            "it, or unset it."
        )


def _keep_store(point: Rendezvous) -> None:
    try:
        store.Keeper(wire.listen_for_others(point.address), point.secret)
    except OSError as error:
        if isinstance(point.address, tuple):
            raise RuntimeError(rendezvous.in_use(*point.address)) from None
        raise RuntimeError(f"popdist: the instances cannot meet at {point} ({error}).") from None


def _reach(point: Rendezvous, index: int, instances: int, wait: int) -> store.Client:
    """A connection to the keys and values that all instances see."""
    try:
        return store.connect(point.address, point.secret, Deadline(wait))
    except wire.Stranger as error:
        raise InstanceError(
            f"popdist: instance {index} found another program at {point} ({error}); expected one "
            f"of this run: {rendezvous.how_to_share()}."
        ) from None
    except wire.Unreachable as error:
        raise InstanceError(
            f"popdist: instance {index} did not reach instance 0 at {point} within {wait} s "
            f"({error}); expected all {instances} instances, with one MASTER_ADDR and "
            "MASTER_PORT. Start them all."
        ) from None


def _meet(
    values: store.Client, index: int, instances: int, place: Place, wait: int
) -> Iterator[tuple[str, Place]]:
    """Wait until all instances have come. Yields the name and the place of each."""
    values.set(f"joined/{index}", json.dumps([own_name(), *place]))
    deadline = Deadline(wait)
    for other in range(instances):
        try:
            name, machine, port = json.loads(values.get(f"joined/{other}", deadline))
        except store.StoreError as error:
            raise InstanceError(
                f"popdist: instance {index} waited {wait} s for instance {other} to "
                f"start; expected all {instances} instances ({error})."
            ) from None
        yield str(name), (str(machine), int(port))


@contextmanager
def reaching_others(
    what: str | Callable[[], str],
    errors: type[Exception] | tuple[type[Exception], ...] = RuntimeError,
    is_told: bool = True,
) -> Iterator[None]:
    """Turn the transport's errors in the body into an `InstanceError`: what was going on, and where
    the others are.

    Args:
        what: words for it, or what finds them; another thread may call that.
        errors: those of the transport.
        is_told: whether others that ask hear that this instance waits.
    """
    told = what if callable(what) else lambda: what
    with waiting(told) if is_told else nullcontext():
        try:
            yield
        except errors as error:
            if isinstance(error, InstanceError):
                raise
            if not LATE.search(str(error)):
                time.sleep(AFTERMATH_SECONDS)
            others = "" if _hang_report is None else _hang_report.ask()
            lost = InstanceError(
                f"popdist: instance {getInstanceIndex()} of {getNumInstances()}, {told()}: "
                f"{_in_words(error)} {others}"
            )
            _lost.append(lost)
            raise lost from None


def has_lost() -> bool:
    """Whether another instance was found to be gone, or not to answer."""
    return bool(_lost)


def _in_words(error: Exception) -> str:
    # without a place in torch's sources
    text = re.sub(r"^\[[^]]*\] ", "", str(error).strip().splitlines()[0])
    if LATE.search(text):
        return (
            f"an instance did not answer in time ({text}); expected all to get here. Where such a "
            f"wait has a good reason, raise {TIMEOUT} (poprun --timeout)."
        )
    return (
        f"an instance is gone ({text.split('. This is typically')[0]}). Look at the other "
        "instances' errors first."
    )


def gather(value: Any, what: str = "gathering values") -> list[Any]:
    """Every instance's value, by instance. For small values: None, bool, numbers, text, lists and
    dicts of these.

    Raises:
        TypeError, ValueError: this instance's value is none of them, or too large.
    """
    return _gather(value, what, GATHER, seconds())


def gather_patiently(value: Any, what: str = "gathering values") -> list[Any]:
    """The same as `gather`, where one instance may take up to an hour longer than the others."""
    return _gather(value, what, PATIENT, PATIENT_SECONDS)


def gather_beside(value: Any, what: str = "gathering values") -> list[Any]:
    """The same as `gather_patiently`, in a thread beside the program's, one in each instance."""
    return _gather(value, what, BESIDE, PATIENT_SECONDS)


def _gather(value: Any, what: str, tag: int, wait: float) -> list[Any]:
    index, instances = getInstanceIndex(), getNumInstances()
    content = as_text(value).encode()
    if instances == 1:
        return [json.loads(content)]
    if len(content) > VALUE_BYTES:
        raise ValueError(f"got a value of {len(content)} bytes; expected at most {VALUE_BYTES}")
    others = [other for other in range(instances) if other != index]
    found = {other: bytearray(8) for other in others}
    with reaching_others(what, TransferError, is_told=tag != BESIDE):
        messages, parts = connect().messages, (len(content).to_bytes(8, "big"), content)
        sent = [messages.send(other, tag, part) for other in others for part in parts]
        messages.wait([messages.receive(other, tag, found[other]) for other in others], wait)
        for other in others:
            size = int.from_bytes(found[other], "big")
            if size > VALUE_BYTES:
                raise TransferError(f"got a value of {size} bytes; expected at most {VALUE_BYTES}")
            found[other] = bytearray(size)
        messages.wait(sent + [messages.receive(other, tag, found[other]) for other in others], wait)
    return [json.loads(found.get(instance, content)) for instance in range(instances)]


def as_text(value: Any) -> str:
    """A value as JSON, where tuples become lists. TypeError: others would read something else."""
    _check(value, value)
    return json.dumps(value)


def _check(part: Any, value: Any) -> None:
    is_dict = isinstance(part, dict) and all(isinstance(key, str) for key in part)
    if part is None or isinstance(part, (bool, int, float, str)):
        return
    if not is_dict and not isinstance(part, (list, tuple)):
        raise TypeError(
            f"gather: got {type(part).__name__} in a {type(value).__name__}; expected None, bool, "
            "int, float, str, and lists and dicts of these with keys of str. Convert it: arrays "
            "have tolist()."
        )
    for each in part.values() if is_dict else part:
        _check(each, value)


def broadcast(data: Any, source: int, what: str) -> None:
    """Fill a buffer with what one instance has in its own. Patient: that may do meanwhile what only
    it does.
    """
    messages, index = connect().messages, getInstanceIndex()
    with reaching_others(what, TransferError):
        if index == source:
            others = [other for other in range(getNumInstances()) if other != source]
            transfers = [messages.send(other, BROADCAST, data) for other in others]
        else:
            transfers = [messages.receive(source, BROADCAST, data)]
        messages.wait(transfers, PATIENT_SECONDS)


def barrier(what: str = "waiting at a barrier") -> None:
    """Wait until every instance has come here; one may take up to an hour longer than the
    others.
    """
    gather_patiently(None, what)


def difference(text: str) -> str | None:
    """The place where an instance's text first differs from instance 0's, in words, the same on
    every instance; None: nowhere.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()
    if len(set(gather_patiently(digest, "comparing programs"))) == 1:
        return None
    texts = [shared.splitlines() for shared in gather_patiently(text, "comparing programs")]
    instance, other = next((i, lines) for i, lines in enumerate(texts) if lines != texts[0])
    lines = enumerate(zip_longest(texts[0], other, fillvalue="nothing more"), start=1)
    line, (ours, theirs) = next(each for each in lines if each[1][0] != each[1][1])
    ours, theirs = ours.strip(), theirs.strip()
    return f"instance 0 has '{ours}', instance {instance} has '{theirs}' (line {line})"
