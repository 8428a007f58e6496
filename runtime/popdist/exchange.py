"""What the processes of a run tell each other on the host: barriers, and small values gathered.

`torch.distributed` carries it, over Gloo. It is loaded by name, and only where there are several instances, so that
programs are built without torch elsewhere. Every function here is collective: all instances call it, in the same order.
"""

import atexit
import hashlib
import importlib
import os
import re
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple, Type, Union

from popdist.environment import (
    getInstanceIndex,
    getNumInstances,
    getNumTotalReplicas,
    number_from_environment,
)
from popdist.pulse import Pulse
from popdist.roll_call import RollCall, own_name, waiting

TIMEOUT = "POPDIST_TIMEOUT"
"""Environment variable: seconds that an instance waits for others at a collective before the run ends."""
SECONDS, JOIN_SECONDS, PATIENT_SECONDS = 60, 300, 3600
"""Defaults: at collectives; for all to start; while one instance does what only it does, such as writing files."""
CONNECT_SECONDS, RETRY_SECONDS = 5, 0.1
"""An attempt to connect, and from one to the next."""
PULSE_SECONDS = 10
"""How much longer than at a collective an instance may be silent altogether: what waits there can say more."""
AFTERMATH_SECONDS = 3.0
"""An instance that lost another waits so long before it says so: the other's own error comes first, and alone where the
launcher ends the run meanwhile."""
INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable: the network interface by which other instances are reached; the launcher sets it, too."""
LATE = re.compile("timed? ?out", re.IGNORECASE)
"""In the transport's errors: nobody came in time."""


class InstanceError(RuntimeError):
    """Another instance is gone, or does not answer."""


@dataclass(frozen=True)
class Connection:
    """This process's connections to all others."""

    distributed: Any
    """The module `torch.distributed`."""
    patient: Any
    """A process group for waits of unknown length."""


_connection: Optional[Connection] = None
_roll_call: Optional[RollCall] = None
"""From when all instances have come."""
_lost: List[InstanceError] = []
"""Of instances that are gone or do not answer."""


def init() -> None:
    """Start communication between the instances; with one there is nothing to start. A Session does it, too.

    Raises:
        RuntimeError, ValueError: the launcher's environment is half set, or wrong.
    """
    getInstanceIndex()
    getNumTotalReplicas()
    seconds()
    if getNumInstances() > 1:
        connect()


def seconds() -> int:
    """How long an instance waits for others at a collective. ValueError if the variable is no positive number."""
    found = number_from_environment(TIMEOUT, SECONDS)
    if found < 1:
        raise ValueError(f"environment variable {TIMEOUT}: got {found}; expected at least 1 second.")
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


@contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the process in the body, where torch waits for others and no exception would be heard."""
    is_main = threading.current_thread() is threading.main_thread()
    is_plain = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_plain:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if is_plain:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _open(index: int, instances: int) -> Connection:
    global _roll_call
    distributed = importlib.import_module("torch.distributed")
    short, long = timedelta(seconds=seconds()), timedelta(seconds=PATIENT_SECONDS)
    host, port = _address()
    is_master = index == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = _store(distributed, host, port, index, instances, is_master)
    check_interface()
    names = _meet(store, index, instances)
    _roll_call = RollCall(_client(distributed, host, port), index, names, is_master)
    atexit.register(_roll_call.stop)
    silence = seconds() + PULSE_SECONDS
    with reaching_others(_opening):
        if not distributed.is_initialized():
            distributed.init_process_group("gloo", store=store, rank=index, world_size=instances, timeout=short)
        group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=silence))
        patient = distributed.new_group(backend="gloo", timeout=long)
    pulse = Pulse(importlib.import_module("torch"), distributed, group, index, names, silence)
    atexit.register(_leave, distributed, pulse)
    return Connection(distributed, patient)


def _leave(distributed: Any, pulse: Pulse) -> None:
    """Close the connections, or else threads outlive what they use.

    Where another instance is lost they may wait for it still, and closing would abort the process; it has said what
    there is to say, and ends.
    """
    pulse.stop()
    if _lost:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    distributed.destroy_process_group()


def check_interface() -> None:
    """RuntimeError if the network interface that the environment names is not there."""
    named, there = os.environ.get(INTERFACE), [name for _, name in socket.if_nameindex()]
    if named and (missing := [name for name in named.split(",") if name not in there]):
        raise RuntimeError(
            f"environment variable {INTERFACE}: got {missing[0]!r}; expected a network interface of this machine, of "
            f"{', '.join(there)}. Correct it, or unset it."
        )


def _opening() -> str:
    interface = os.environ.get(INTERFACE, "unset: the address of this machine's name is taken")
    return f"opening connections ({INTERFACE} is {interface})"


def _address() -> Tuple[str, int]:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"popdist: got RANK and WORLD_SIZE without {', '.join(missing)}; expected all of the launcher's variables. "
            "Start the program with torchrun or poprun."
        )
    return os.environ["MASTER_ADDR"], number_from_environment("MASTER_PORT", 0)


def _join_seconds() -> int:
    return max(JOIN_SECONDS, seconds())


def _store(distributed: Any, host: str, port: int, index: int, instances: int, is_master: bool) -> Any:
    """Keys and values that all instances see. Instance 0 keeps them, the master, unless the launcher does."""
    wait = _join_seconds()
    if not is_master and (problem := unreachable(host, port, wait)) is not None:
        raise InstanceError(
            f"popdist: instance {index} did not reach instance 0 at {host}:{port} within {wait} s ({problem}); "
            f"expected all {instances} instances, with one MASTER_ADDR and MASTER_PORT. Start them all."
        )
    try:
        return _client(distributed, host, port, is_master)
    except RuntimeError as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            raise RuntimeError(
                f"popdist: got MASTER_PORT={port} on {host}, which is in use; expected a free port. Choose another "
                "(poprun --master-port), or none: poprun finds one."
            ) from None
        raise InstanceError(f"popdist: instance {index} cannot reach {host}:{port}: {error}") from None


def _client(distributed: Any, host: str, port: int, is_master: bool = False) -> Any:
    """A connection to the store."""
    wait = _join_seconds()
    silent = (
        f"popdist: got no answer from {host}:{port} within {wait} s, though something listens there; expected instance "
        "0. Correct MASTER_ADDR and MASTER_PORT."
    )
    with ended_after(wait + CONNECT_SECONDS, silent):
        store = distributed.TCPStore(
            host, port, None, is_master, timeout=timedelta(seconds=wait), wait_for_workers=False
        )
    return distributed.PrefixStore("popdist", store)


def _meet(store: Any, index: int, instances: int) -> List[str]:
    """Wait until all instances have come. Returns their names."""
    store.set(f"joined/{index}", own_name())
    try:
        for other in range(instances):
            store.wait([f"joined/{other}"])
    except RuntimeError as error:
        raise InstanceError(
            f"popdist: instance {index} waited {_join_seconds()} s for instance {other} to start; expected all "
            f"{instances} instances ({error})."
        ) from None
    return [store.get(f"joined/{other}").decode() for other in range(instances)]


def unreachable(host: str, port: int, wait: float) -> Optional[str]:
    """Try to connect until somebody listens there; after so many seconds why nobody could be reached, in words.

    torch tries as well, but tells of it in its own words, with stack traces.
    """
    until = time.monotonic() + wait
    while True:
        try:
            socket.create_connection((host, port), CONNECT_SECONDS).close()
            return None
        except OSError as error:
            if time.monotonic() > until:
                return error.strerror or str(error)
        time.sleep(RETRY_SECONDS)


@contextmanager
def ended_after(wait: float, problem: str) -> Iterator[None]:
    """End the process with a message where the body takes longer: torch waits without end for a silent listener."""

    def end() -> None:
        print(problem, file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(wait, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def make_group(instances: Sequence[int], backend: str) -> Any:
    """A process group of some instances. Every instance calls this; those outside get a group that is of no use."""
    connection = connect()
    with reaching_others(_opening):
        return connection.distributed.new_group(list(instances), timedelta(seconds=seconds()), backend)


@contextmanager
def reaching_others(what: Union[str, Callable[[], str]], errors: Type[Exception] = RuntimeError) -> Iterator[None]:
    """Turn the transport's errors in the body into an `InstanceError`: what was going on, and where the others are.

    Args:
        what: words for it, or what finds them; another thread may call that.
        errors: those of the transport.
    """
    told = what if callable(what) else lambda: what
    with waiting(told):
        try:
            yield
        except errors as error:
            if isinstance(error, InstanceError):
                raise
            if not LATE.search(str(error)):
                time.sleep(AFTERMATH_SECONDS)
            others = "" if _roll_call is None else _roll_call.call()
            lost = InstanceError(
                f"popdist: instance {getInstanceIndex()} of {getNumInstances()}, {told()}: {_in_words(error)} {others}"
            )
            _lost.append(lost)
            raise lost from None


def _in_words(error: Exception) -> str:
    text = re.sub(r"^\[[^]]*\] ", "", str(error).strip().splitlines()[0])  # without a place in Gloo's source
    if LATE.search(text):
        return (
            f"an instance did not answer in time ({text}); expected all to get here. Where such a wait has a good "
            f"reason, raise {TIMEOUT} (poprun --timeout)."
        )
    return f"an instance is gone ({text.split('. This is typically')[0]}). Look at the other instances' errors first."


def gather(value: Any, what: str = "gathering values") -> List[Any]:
    """Every instance's value, by instance. For small values that pickle."""
    return _gather(value, what, None)


def gather_patiently(value: Any, what: str = "gathering values") -> List[Any]:
    """As `gather`, where one instance may take up to an hour longer than the others."""
    return _gather(value, what, "patient")


def _gather(value: Any, what: str, group: Optional[str]) -> List[Any]:
    instances = getNumInstances()
    if instances == 1:
        return [value]
    connection = connect()
    values: List[Any] = [None] * instances
    with reaching_others(what):
        connection.distributed.all_gather_object(values, value, group=connection.patient if group else None)
    return values


def barrier(what: str = "waiting at a barrier") -> None:
    """Wait until every instance has come here; one may take up to an hour longer than the others."""
    gather_patiently(None, what)


def difference(text: str) -> Optional[str]:
    """Where an instance's text first differs from instance 0's, in words, the same on every instance; None: nowhere."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    if len(set(gather_patiently(digest, "comparing programs"))) == 1:
        return None
    texts = [shared.splitlines() for shared in gather_patiently(text, "comparing programs")]
    instance = next(i for i, lines in enumerate(texts) if lines != texts[0])
    first, other = texts[0], texts[instance]
    line = next((i for i, (a, b) in enumerate(zip(first, other)) if a != b), min(len(first), len(other)))
    shown = [lines[line].strip() if line < len(lines) else "nothing more" for lines in (first, other)]
    return f"instance 0 has '{shown[0]}', instance {instance} has '{shown[1]}' (line {line + 1})"
