"""What a program will cost: work, memory and traffic of each phase, and the time that a machine
needs for them.

A phase is a graph that the main graph calls or repeats, or that a loop of steps in it does; its
name is the function's. A loop of steps is all that a main graph does, or calls several of its
phases again. Everything is per replica and for one run of a session, all repeats of the phase
together, unless its name says otherwise.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isclose
from typing import Protocol

from popxl.remote_buffer import RemoteBuffer

PRODUCTS = ("matmul",)
"""Ops whose FLOPs count as matrix products."""


@dataclass(frozen=True)
class Collective:
    """All calls of one collective over groups of one size and stride."""

    op: str
    group_size: int
    stride: int
    """Distance between consecutive members of a group; 0 where it is not constant."""
    calls: int
    brought_bytes: int
    """Bytes of this replica's operands."""
    sent_bytes: int
    """Bytes that this replica sends in a ring of n members: 2 (n-1)/n of an all-reduce's operand,
    (n-1)/n of a reduce-scatter's operand or an all-gather's result, padding of their shards
    included."""


@dataclass(frozen=True)
class TimelineStep:
    """Something that a replica does after another: it computes, a collective begins or ends, or
    steps are done several times.
    """

    flops: int = 0
    begins: str = ""
    """Name of the collective that begins."""
    sent_bytes: int = 0
    """Bytes that it sends."""
    ends: str = ""
    """Name of the collective that ends: what follows needs its result."""
    times: int = 1
    steps: "tuple[TimelineStep, ...]" = ()

    @property
    def is_compute(self) -> bool:
        """Whether it only computes."""
        return not (self.begins or self.ends or self.steps)


@dataclass(frozen=True)
class Phase:
    """One phase of a run."""

    name: str
    runs: int
    """How often it runs."""
    flops_by_op: dict[str, int]
    """FLOPs of each kind of op."""
    loads: int
    loaded_bytes: int
    """Bytes from remote memory."""
    stores: int
    stored_bytes: int
    """Bytes to remote memory."""
    host_bytes: int
    """Bytes to and from the host's streams."""
    peak_bytes: int
    """Most bytes of device memory that are in use at a time, those that the main graph keeps
    included.
    """
    remote_memory_bytes: int
    """Remote memory, on one replica, of the buffers that the phase loads from or stores to."""
    collectives: tuple[Collective, ...]
    timeline: tuple[TimelineStep, ...] = field(default=(), repr=False)
    """The order of what processors and links do, where each replica has a machine of its own; none:
    collectives are waited for.
    """

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return sum(self.flops_by_op.values())

    @property
    def product_flops(self) -> int:
        """FLOPs of matrix products: 2 m k n each."""
        return sum(self.flops_by_op.get(name, 0) for name in PRODUCTS)

    @property
    def remote_bytes(self) -> int:
        """Bytes to and from remote memory."""
        return self.loaded_bytes + self.stored_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to other replicas."""
        return sum(c.sent_bytes for c in self.collectives)


@dataclass(frozen=True)
class Plan:
    """What one run of a program costs each of its replicas."""

    replicas: int
    steps: int
    """Steps of the run: the main graph is one, unless it only repeats one, and so is each iteration
    of a loop of steps.
    """
    phases: tuple[Phase, ...]
    """Phases, in the order in which the run first reaches them. What the main graph does by itself
    is "main".
    """
    remote_memory_bytes: int
    """Remote memory of one replica's rows. On a CPU those that pass nothing on need not all have
    memory at a time.
    """
    buffers: dict[str, int]
    """Bytes of each remote buffer, by number, shape of a row and type."""

    @property
    def peak_bytes(self) -> int:
        """Device memory of one replica."""
        return max(phase.peak_bytes for phase in self.phases)

    @property
    def total_remote_memory_bytes(self) -> int:
        """Remote memory of all replicas together."""
        return self.remote_memory_bytes * self.replicas


@dataclass(frozen=True)
class Machine:
    """Speeds of one replica's device and of its connections."""

    flops: float
    """Speed of matrix products, FLOP/s."""
    link: float
    """Speed to the other replicas, bytes/s that one replica sends."""
    remote: float
    """Speed to remote memory, bytes/s, both directions together."""


class Amounts(Protocol):
    """What takes time on a machine: a `Phase`, or the `popxl.profile.Work` of a run."""

    @property
    def flops(self) -> int:
        """Floating-point operations."""

    @property
    def remote_bytes(self) -> int:
        """Bytes to and from remote memory."""

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to other replicas."""


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of one phase."""

    compute: float
    link: float
    remote: float
    exposed: float
    """The part of the links' seconds in which nothing is computed."""

    @property
    def seconds(self) -> float:
        """Rows come and go while the device computes, and so do messages as far as nothing needs
        them.
        """
        return max(self.compute + self.exposed, self.remote)

    @property
    def limit(self) -> float:
        """The physical limit: the larger of work over the device's rate and rows over remote
        memory's.
        """
        return max(self.compute, self.remote)

    @property
    def parts(self) -> dict[str, float]:
        """What the seconds are made of: rows alone where they take longer than all else, or else
        "compute" and, as far as they are exposed, "links".
        """
        if self.remote > self.compute + self.exposed:
            return {"remote": self.remote}
        return {"compute": self.compute, "links": self.exposed}

    @property
    def bound(self) -> str:
        """The largest of the parts: what has to be faster for less time."""
        return max(self.parts, key=lambda name: self.parts[name])


def phase_time(phase: Amounts, machine: Machine) -> PhaseTime:
    """The times of a phase, or of some other work, on a machine."""
    compute, link = phase.flops / machine.flops, phase.sent_bytes / machine.link
    timeline = phase.timeline if isinstance(phase, Phase) else ()
    exposed = _Clock(machine).waited(timeline) if timeline else link
    return PhaseTime(compute, link, phase.remote_bytes / machine.remote, exposed)


class _Clock:
    """Follows a timeline: one processor, and one link, which sends one message after the other."""

    def __init__(self, machine: Machine):
        self._machine = machine
        self._now, self._link_is_free = 0.0, 0.0
        self._ends: dict[str, float] = {}

    def waited(self, steps: Iterable[TimelineStep]) -> float:
        """Go through steps. Returns the seconds in which the processor waited."""
        return sum(map(self._do, steps))

    def _do(self, step: TimelineStep) -> float:
        if step.steps:
            return self._repeat(step)
        self._now += step.flops / self._machine.flops
        if step.begins:
            begin = max(self._now, self._link_is_free)
            self._link_is_free = begin + step.sent_bytes / self._machine.link
            self._ends[step.begins] = self._link_is_free
        wait = max(0.0, self._ends[step.ends] - self._now) if step.ends else 0.0
        self._now += wait
        return wait

    def _repeat(self, step: TimelineStep) -> float:
        """Do steps as often as they are done. Once the link has as much left to send after them as
        before, they take the same time whenever they come again.
        """
        total, left = 0.0, step.times
        while left:
            start, backlog = self._now, self._backlog
            waited = self.waited(step.steps)
            same, left = 1, left - 1
            if isclose(self._backlog, backlog, abs_tol=1e-12):
                same, left = left + 1, 0
                self._now = start + same * (self._now - start)
                self._link_is_free = max(self._link_is_free, self._now + backlog)
            total += same * waited
        return total

    @property
    def _backlog(self) -> float:
        """Seconds for which the link still sends what has begun."""
        return max(0.0, self._link_is_free - self._now)


@dataclass(frozen=True)
class Event:
    """Something that a replica does at a definite point of a run."""

    phase: str
    kind: str
    """"load" or "store" of a remote row, or "collective"."""
    name: str
    """The collective's op; the buffer's number for rows."""
    row: int = 0
    """The row of the buffer."""


@dataclass(frozen=True)
class Move:
    """An op that moves a tensor of a replica: a row, an element of a stream, or an operand of a
    collective.
    """

    phase: str
    op: str
    times: int
    """How often a run comes by."""
    nbytes: int
    """Bytes that it moves then."""
    buffer: RemoteBuffer | None = None
    """The buffer of a row."""
