"""Replicas of one process in lockstep: generators that yield at collectives until their group is complete."""

from dataclasses import dataclass
from typing import Any, Callable, Dict, Generator, List, Sequence, Tuple

from popxl.errors import GraphError


@dataclass(eq=False)
class Rendezvous:
    """One replica's arrival at a collective.

    members: replicas of its group, in group order. operands: this replica's operands. combine: the kernel,
    ``(list of each operand over the members) -> list of the members' results``. place: which op of the program this is.
    """

    place: Any
    members: Tuple[int, ...]
    operands: Tuple[Any, ...]
    combine: Callable[..., List[Any]]
    describe: str


Program = Generator[Rendezvous, Any, Any]


def run_lockstep(programs: Dict[int, Program]) -> Dict[int, Any]:
    """Run every replica's program to its end; returns their results by replica.

    Raises:
        GraphError: replicas wait at different collectives, or one ended while others wait for it.
    """
    results: Dict[int, Any] = {}
    waiting: Dict[int, Rendezvous] = {}
    ready: Dict[int, Any] = dict.fromkeys(programs)
    while ready or waiting:
        for replica, value in list(ready.items()):
            try:
                waiting[replica] = programs[replica].send(value)
            except StopIteration as end:
                results[replica] = end.value
        ready = _complete(waiting)
        if waiting and not ready:
            raise GraphError(_deadlock(waiting, results))
        for replica in ready:
            del waiting[replica]
    return results


def _complete(waiting: Dict[int, Rendezvous]) -> Dict[int, Any]:
    """Results for every replica whose whole group waits at the same place."""
    ready: Dict[int, Any] = {}
    for replica, arrival in waiting.items():
        if replica in ready:
            continue
        group = [waiting.get(member) for member in arrival.members]
        if all(other is not None and other.place is arrival.place for other in group):
            arrivals: Sequence[Any] = group
            operands = [[a.operands[i] for a in arrivals] for i in range(len(arrival.operands))]
            ready.update(zip(arrival.members, arrival.combine(*operands)))
    return ready


def _deadlock(waiting: Dict[int, Rendezvous], ended: Dict[int, Any]) -> str:
    lines = [f"replica {r} waits at {a.describe} for replicas {list(a.members)}" for r, a in sorted(waiting.items())]
    done = f"; replicas {sorted(ended)} have ended" if ended else ""
    return (
        "collectives: got replicas that wait for each other at different places: "
        + "; ".join(lines)
        + done
        + "; expected every replica of "
        "a group to reach the same collective. Look for a conditional whose condition differs between replicas."
    )
