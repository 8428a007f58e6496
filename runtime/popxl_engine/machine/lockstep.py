"""Replicas of one process in lockstep: generators that yield at collectives until their group is
complete.

Members of a group that live in other processes are reached through the fabric.
"""

from collections.abc import Generator, Sequence
from contextlib import nullcontext
from typing import Any

from popxl.errors import GraphError

from popxl_engine.machine.arrival import Arrival, waits
from popxl_engine.machine.communicator import Seat
from popxl_engine.machine.fabric import Exchange, Fabric
from popxl_engine.machine.laps import Laps
from popxl_engine.machine.tree_reduction import TreeReduction, is_tree_reduced

Reductions = dict[tuple[Any, tuple[int, ...]], TreeReduction]
"""Reductions that have begun, by site and group."""

ReplicaRun = Generator[Arrival, Any, Any]


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
    results: dict[int, Any] = {}
    waiting: dict[int, Arrival] = {}
    ready: dict[int, Any] = dict.fromkeys(programs)
    abroad: dict[tuple[int, ...], Exchange] = {}
    reductions: Reductions = {}
    while ready or waiting:
        for replica, value in list(ready.items()):
            if laps is not None:
                laps.resume(replica)
            try:
                waiting[replica] = _next(programs[replica], replica, value)
                _fold(waiting[replica], replica, reductions, fabric)
            except StopIteration as end:
                results[replica] = end.value
        ready = _complete(waiting, abroad, reductions, fabric)
        if fabric is not None and abroad and not ready:
            with nullcontext() if laps is None else laps.waiting_for_others():
                ready = fabric.finish(abroad)
        if waiting and not ready:
            raise GraphError(_deadlock(waiting, results))
        for replica in ready:
            del waiting[replica]
    return results


def _next(program: ReplicaRun, replica: int, value: Any) -> Arrival:
    """Go on with a program to where it waits for others. StopIteration where it ends."""
    arrival = program.send(value)
    while arrival.reads == "own":
        seat = Seat(len(arrival.members), arrival.members.index(replica))
        arrival = program.send(arrival.apart(seat, *arrival.operands))
    return arrival


def _fold(arrival: Arrival, replica: int, reductions: Reductions, fabric: Fabric | None) -> None:
    """Begin, or go on with, a reduction whose operands are large and all come from this process."""
    if arrival.pair is None or not is_tree_reduced(arrival.operands):
        return
    if fabric is not None and not all(member in fabric.local for member in arrival.members):
        return
    key = (arrival.site, arrival.members)
    if key not in reductions:
        reductions[key] = TreeReduction(len(arrival.members), arrival.pair)
    reductions[key].add(arrival.members.index(replica), arrival.operands)


def _complete(
    waiting: dict[int, Arrival],
    abroad: dict[tuple[int, ...], Exchange],
    reductions: Reductions,
    fabric: Fabric | None,
) -> dict[int, Any]:
    """Results for every replica whose whole group waits at the same site.

    Where that holds for a group's replicas in this process, and it has others, an exchange with
    those is begun.
    """
    ready: dict[int, Any] = {}
    for replica, arrival in waiting.items():
        if replica in ready or arrival.members in abroad:
            continue
        here = (
            arrival.members
            if fabric is None
            else tuple(m for m in arrival.members if m in fabric.local)
        )
        group = [waiting.get(member) for member in here]
        if any(other is None or other.site is not arrival.site for other in group):
            continue
        arrivals: Sequence[Any] = group
        if fabric is not None and len(here) < len(arrival.members):
            abroad[arrival.members] = fabric.begin(dict(zip(here, arrivals)))
        elif (reduction := reductions.pop((arrival.site, arrival.members), None)) is not None:
            ready.update(zip(arrival.members, arrival.combine(reduction)))
        else:
            operands = [[a.operands[i] for a in arrivals] for i in range(len(arrival.operands))]
            ready.update(zip(arrival.members, arrival.combine(*operands)))
    return ready


def _deadlock(waiting: dict[int, Arrival], ended: dict[int, Any]) -> str:
    done = f"; replicas {sorted(ended)} have ended" if ended else ""
    return (
        "collectives: got replicas that wait for each other at different collectives: "
        + waits(waiting)
        + done
        + "; expected every replica of a group to reach the same collective. Look for a "
        "conditional whose condition differs between replicas."
    )
