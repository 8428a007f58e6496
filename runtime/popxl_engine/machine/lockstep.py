"""Replicas of one process in lockstep: generators that yield at collectives until their group is
complete.

Members of a group that live in other processes are reached through the fabric.
"""

from collections import defaultdict
from collections.abc import Generator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from popxl.errors import GraphError

from popxl_engine.machine.arrival import Arrival, waits
from popxl_engine.machine.communicator import Seat
from popxl_engine.machine.fabric import Fabric
from popxl_engine.machine.laps import Laps
from popxl_engine.machine.transport import Exchange
from popxl_engine.machine.tree_reduction import TreeReduction, is_tree_reduced


@dataclass(eq=False)
class Meeting:
    """One collective of one group."""

    arrivals: dict[int, Arrival] = field(default_factory=dict)
    """The arrivals of the members in this process, as far as they have come."""
    reduction: TreeReduction | None = None
    """A reduction that has begun."""
    exchange: Exchange | None = None
    """The way to members in other processes, once all of this one have come."""
    results: dict[int, Any] | None = None
    """Results by replica."""


ReplicaRun = Generator[Arrival | Meeting, Any, Any]
"""A program yields its arrival at a collective, and gets its result; or, where that goes on, the
meeting, which it yields where it needs the result.
"""


def run_lockstep(
    programs: dict[int, ReplicaRun], fabric: Fabric | None = None, laps: Laps | None = None
) -> dict[int, Any]:
    """Run every replica's program to its end; returns their results by replica.

    Args:
        programs: of the replicas in this process.
        fabric: reaches the replicas of other processes.
        laps: gets to know whose turn it is.
    Raises:
        GraphError: replicas wait at different collectives, or one ended while others wait for it.
    """
    if fabric is not None:
        fabric.begin_run()
    return _Lockstep(programs, fabric, laps).run()


class _Lockstep:
    """Programs under way."""

    def __init__(self, programs: dict[int, ReplicaRun], fabric: Fabric | None, laps: Laps | None):
        self._programs, self._fabric, self._laps = programs, fabric, laps
        self._waiting: dict[int, Meeting] = {}
        self._open: defaultdict[tuple[Any, tuple[int, ...]], list[Meeting]] = defaultdict(list)
        """Meetings that members of this process have still to come to, by site and group."""

    def run(self) -> dict[int, Any]:
        """See `run_lockstep`."""
        results: dict[int, Any] = {}
        ready: dict[int, Any] = dict.fromkeys(self._programs)
        while ready or self._waiting:
            for replica, value in ready.items():
                if self._laps is not None:
                    self._laps.resume(replica)
                try:
                    self._waiting[replica] = self._next(replica, value)
                except StopIteration as end:
                    results[replica] = end.value
            ready = self._ready() or self._received()
            if self._waiting and not ready:
                raise GraphError(_deadlock(self._waiting, results))
            for replica in ready:
                del self._waiting[replica]
        return results

    def _next(self, replica: int, value: Any) -> Meeting:
        """Go on with a program to where it waits for others. StopIteration where it ends."""
        while True:
            found = self._programs[replica].send(value)
            if isinstance(found, Meeting):
                return found
            if found.reads == "own":
                seat = Seat(len(found.members), found.members.index(replica))
                value = found.apart(seat, *found.operands)
                continue
            meeting = self._arrive(replica, found)
            if not found.goes_on:
                return meeting
            value = meeting

    def _ready(self) -> dict[int, Any]:
        """The results that replicas wait for, as far as they are there."""
        return {
            replica: meeting.results.pop(replica)
            for replica, meeting in self._waiting.items()
            if meeting.results is not None
        }

    def _received(self) -> dict[int, Any]:
        """The results of the first exchange that ends; none where no replica waits for any."""
        abroad = {m.exchange: m for m in self._waiting.values() if m.exchange is not None}
        if not abroad:
            return {}
        assert self._fabric is not None
        with nullcontext() if self._laps is None else self._laps.waiting_for_others():
            exchange, results = self._fabric.finish(list(abroad))
        abroad[exchange].results = results
        return self._ready()

    def _arrive(self, replica: int, arrival: Arrival) -> Meeting:
        """Come to the first meeting of a group that a member has not come to. The last of a
        process begins the exchange with others, or does what is to be done.
        """
        meetings = self._open[arrival.site, arrival.members]
        meeting = next((m for m in meetings if replica not in m.arrivals), None)
        if meeting is None:
            meeting = Meeting()
            meetings.append(meeting)
        meeting.arrivals[replica] = arrival
        here = self._here(arrival)
        is_abroad = len(here) < len(arrival.members)
        if not is_abroad:
            _fold(meeting, replica, arrival)
        if len(meeting.arrivals) == len(here):
            meetings.remove(meeting)
            if is_abroad:
                assert self._fabric is not None
                arrivals = {member: meeting.arrivals[member] for member in here}
                meeting.exchange = self._fabric.begin(arrivals)
            else:
                meeting.results = dict(zip(here, _combined(meeting, here)))
        return meeting

    def _here(self, arrival: Arrival) -> tuple[int, ...]:
        """The members of a group that live in this process."""
        if self._fabric is None:
            return arrival.members
        return tuple(m for m in arrival.members if m in self._fabric.local)


def _fold(meeting: Meeting, replica: int, arrival: Arrival) -> None:
    """Begin, or go on with, a reduction whose operands are large and all come from this process."""
    if arrival.pair is None or not is_tree_reduced(arrival.operands):
        return
    if meeting.reduction is None:
        meeting.reduction = TreeReduction(len(arrival.members), arrival.pair)
    meeting.reduction.add(arrival.members.index(replica), arrival.operands)


def _combined(meeting: Meeting, members: tuple[int, ...]) -> Any:
    """The members' results."""
    arrivals = [meeting.arrivals[member] for member in members]
    if meeting.reduction is not None:
        return arrivals[0].combine(meeting.reduction)
    return arrivals[0].combine(
        *([a.operands[i] for a in arrivals] for i in range(len(arrivals[0].operands)))
    )


def _deadlock(waiting: dict[int, Meeting], ended: dict[int, Any]) -> str:
    done = f"; replicas {sorted(ended)} have ended" if ended else ""
    places = waits({replica: meeting.arrivals[replica] for replica, meeting in waiting.items()})
    return (
        "collectives: got replicas that wait for each other at different collectives: "
        + places
        + done
        + "; expected every replica of a group to reach the same collective. Look for a "
        "conditional whose condition differs between replicas."
    )
