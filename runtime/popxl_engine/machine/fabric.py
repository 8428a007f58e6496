"""Collectives over several processes: what members of a group in other processes contribute.

Where each replica has a process and a GPU of its own, the GPUs' collectives serve (`communicator`).
Elsewhere each process sends what its replicas bring to the processes that need it, through host
memory, and runs the same kernel on the operands of all members in group order. So the numbers do
not depend on which process a replica lives in.

Messages go from process to process, are posted as soon as a group's replicas in a process have
arrived, and carry the collective's site and the group as their tag. So nobody waits for anything
but the members of its own group. Where replicas go on meanwhile, a thread moves them (`mover`), and
devices do on a stream of their own.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

import torch
from popdist import exchange
from popdist.messages import Transfer, TransferError

from popxl_engine.machine.arrival import Arrival, waits
from popxl_engine.machine.communicator import Communicator, as_bytes, make_communicators
from popxl_engine.machine.mover import mover
from popxl_engine.machine.side_stream import SideStream

HOST = torch.device("cpu")
TAGS = 2**31
"""Tags of messages are below."""
SPLIT_BYTES = 2**14
"""Reductions from this size on are split over the processes of the group: one more message, each
shorter.
"""


@dataclass(eq=False)
class Exchange:
    """One group's collective under way."""

    arrivals: dict[int, Arrival]
    """The arrivals of the members in this process."""
    operands: list[dict[int, torch.Tensor]]
    """The operands, each as every member has it. Those of other processes are filled as far as this
    one needs them.
    """
    ranges: dict[int, tuple[int, int]]
    """The range of the elements that each process reduces for all, by process."""
    incoming: list[tuple[torch.Tensor, list[torch.Tensor]]] = field(default_factory=list)
    """Messages, and the parts of operands that each fills, as bytes."""
    transfers: list[Transfer] = field(default_factory=list)
    """Transfers that must end."""
    second: "Exchange | None" = None
    """The other half of a large reduction, once this process has reduced its range."""
    ends: dict[int, Callable[[], Any]] = field(default_factory=dict)
    """What waits for the results that a stream makes, by replica."""
    done: "Future[dict[int, Any]] | None" = None
    """The results, where a thread waits for them."""
    _lock: Lock = field(default_factory=Lock)

    @property
    def first(self) -> Arrival:
        """One of the arrivals."""
        return next(iter(self.arrivals.values()))

    def parts(self, t: torch.Tensor, instance: int, readers: Sequence[int]) -> list[torch.Tensor]:
        """The bytes of a member's contiguous operand that a process needs for its members, as
        views.
        """
        flat, reads, members = as_bytes(t), self.first.reads, self.first.members
        if self.ranges:
            begin, end = self.ranges[instance]
            return [flat[begin * t.element_size() : end * t.element_size()]]
        if reads != "shard":
            return [flat]
        length = -(-t.numel() // len(members)) * t.element_size()
        return [flat[i * length : (i + 1) * length] for i in map(members.index, readers)]

    def wait(self) -> None:
        """Wait until everything is received and sent, and put the parts of each message
        together.
        """
        if self.transfers:
            exchange.connect().messages.wait(self.transfers, exchange.seconds())
        for message, targets in self.incoming:
            if len(targets) > 1:
                for target, part in zip(targets, message.split([t.numel() for t in targets])):
                    target.copy_(part)

    @property
    def has_moved(self) -> bool:
        """Whether nothing more moves by itself, be it that another process is gone."""
        return all(t.is_done or t.link.problem is not None for t in self.transfers)


class Fabric:
    """This process's way to the replicas of the others.

    Args:
        replicas: number over all processes, which hold equal, consecutive shares.
        local: replicas of this process.
        device: where their tensors are.
        groups: over which the program's collectives go, sorted. Every process must give the same.
    """

    def __init__(
        self,
        replicas: int,
        local: range,
        device: torch.device = HOST,
        groups: Sequence[tuple[int, ...]] = (),
    ):
        self.replicas, self.local, self.device = replicas, local, device
        self.messages = exchange.connect().messages
        self.communicators = make_communicators(device, local, groups)
        """The communicators of replicas that each have a device of their own."""
        self._pool: ThreadPoolExecutor | None = None
        self._side = SideStream(device) if self.communicators is not None else None

    def instance_of(self, replica: int) -> int:
        """The process that a replica lives in."""
        return replica // len(self.local)

    @property
    def instance(self) -> int:
        """This process."""
        return self.instance_of(self.local[0])

    def begin(self, arrivals: dict[int, Arrival]) -> Exchange:
        """Post what this process's members of a group bring, and what they need of the others.
        Waits for nothing.
        """
        first = next(iter(arrivals.values()))
        if self.communicators is not None:
            return self._begin_communicated(Exchange(arrivals, [], {}))
        operands = [
            {m: a.operands[i].to(HOST).contiguous() for m, a in arrivals.items()}
            for i in range(len(first.operands))
        ]
        collective = Exchange(arrivals, operands, self._ranges(first))
        others = {
            other: members
            for other, members in self._homes(first).items()
            if other != self.instance
        }
        with exchange.reaching_others(f"at {first.describe}", TransferError):
            for other, members in others.items():
                self._receive_operands(collective, other, members)
            for other, members in others.items():
                pieces = [
                    p
                    for t in operands
                    for m in arrivals
                    for p in collective.parts(t[m], other, members)
                ]
                if pieces:
                    self._send(
                        collective, other, pieces[0] if len(pieces) == 1 else torch.cat(pieces)
                    )
        if any(arrival.goes_on for arrival in arrivals.values()):
            mover().move(collective, self._advance)
        return collective

    def _begin_communicated(self, collective: Exchange) -> Exchange:
        """The exchange by a communicator: in a stream beside its own where a replica goes on."""
        first = collective.first
        if first.goes_on and self._side is not None and self.communicators is not None:
            team = self.communicators[first.members]
            with exchange.reaching_others(f"at {first.describe}", TransferError):
                collective.ends = {
                    m: self._side.begin(partial(_apart, team, a), a.operands)
                    for m, a in collective.arrivals.items()
                }
        return collective

    def _homes(self, arrival: Arrival) -> dict[int, list[int]]:
        """Processes of a group, each with its members."""
        homes: dict[int, list[int]] = {}
        for member in arrival.members:
            homes.setdefault(self.instance_of(member), []).append(member)
        return dict(sorted(homes.items()))

    def _ranges(self, arrival: Arrival) -> dict[int, tuple[int, int]]:
        """The elements of a large reduction that each process reduces for all, so that less
        travels.
        """
        t = arrival.operands[0]
        if arrival.reads != "elements" or t.numel() * t.element_size() < SPLIT_BYTES:
            return {}
        homes = self._homes(arrival)
        length = -(-t.numel() // len(homes))
        bounds = [min(i * length, t.numel()) for i in range(len(homes) + 1)]
        return {home: (bounds[i], bounds[i + 1]) for i, home in enumerate(homes)}

    def _receive_operands(self, collective: Exchange, other: int, members: Sequence[int]) -> None:
        """Make room for another process's operands, and post the message that fills it."""
        targets: list[torch.Tensor] = []
        for operand in collective.operands:
            like = next(operand[m] for m in collective.arrivals)
            for member in members:
                operand[member] = torch.empty_like(like)
                targets += collective.parts(
                    operand[member], self.instance, list(collective.arrivals)
                )
        if targets:
            size = sum(t.numel() for t in targets)
            message = targets[0] if len(targets) == 1 else targets[0].new_empty(size)
            self._receive(collective, other, message)
            collective.incoming.append((message, targets))

    def _receive(self, collective: Exchange, other: int, message: torch.Tensor) -> None:
        if message.numel():
            collective.transfers.append(
                self.messages.receive(other, self._tag(collective.first), message.numpy())
            )

    def _send(self, collective: Exchange, other: int, message: torch.Tensor) -> None:
        if message.numel():
            collective.transfers.append(
                self.messages.send(other, self._tag(collective.first), message.numpy())
            )

    def _tag(self, arrival: Arrival) -> int:
        """Groups of one site are disjoint, so that the first member tells them apart."""
        tag = arrival.site_index * self.replicas + arrival.members[0]
        if tag >= TAGS:
            raise OverflowError(
                f"collectives: got collective {arrival.site_index} of a program on {self.replicas} "
                f"replicas; expected their product below {TAGS}. Repeat graphs instead of calling "
                "them."
            )
        return tag

    def finish(self, exchanges: Sequence[Exchange]) -> tuple[Exchange, dict[int, Any]]:
        """Wait for one of the exchanges, and return it with its results by replica.

        Where all are at one site of the program, the order is that of their groups; else the first
        that is done.
        """
        with exchange.reaching_others(lambda: _waits(exchanges), TransferError):
            sites = {collective.first.site_index for collective in exchanges}
            found = (
                min(exchanges, key=lambda collective: collective.first.members)
                if len(sites) == 1
                else self._first_done(exchanges)
            )
            return found, self._results(found) if found.done is None else found.done.result()

    def _results(self, collective: Exchange) -> dict[int, Any]:
        """Wait for an exchange and combine: results of the members in this process."""
        if self.communicators is not None:
            if collective.ends:
                return {m: end() for m, end in collective.ends.items()}
            communicator = self.communicators[collective.first.members]
            return {m: _apart(communicator, a) for m, a in collective.arrivals.items()}
        collective.wait()
        first, members = collective.first, collective.first.members
        if collective.ranges:
            return self._joined(collective)
        results = first.combine(*([operand[m] for m in members] for operand in collective.operands))
        return {m: results[members.index(m)].to(self.device) for m in collective.arrivals}

    def _joined(self, collective: Exchange) -> dict[int, Any]:
        """The results of a large reduction, of which each process reduces a range."""
        second = self._advance(collective)
        assert second is not None
        second.wait()
        (whole,) = second.operands[0].values()
        return dict.fromkeys(collective.arrivals, whole.to(self.device))

    def _advance(self, collective: Exchange) -> Exchange | None:
        """Reduce this process's range of the elements of a large reduction, begin to give it to the
        others and to take theirs; once. None where nothing follows.
        """
        with collective._lock:
            if collective.ranges and collective.second is None:
                collective.wait()
                collective.second = self._begin_second(collective)
            return collective.second

    def _begin_second(self, collective: Exchange) -> Exchange:
        operand, members, (begin, end) = (
            collective.operands[0],
            collective.first.members,
            collective.ranges[self.instance],
        )
        own = next(iter(collective.arrivals))
        pieces = [operand[m].reshape(-1)[begin:end] for m in members]
        whole = torch.empty_like(operand[own])
        flat = whole.reshape(-1)
        flat[begin:end] = collective.first.combine(pieces)[members.index(own)]
        second = Exchange(collective.arrivals, [{own: whole}], collective.ranges)
        for other in collective.ranges.keys() - {self.instance}:
            self._receive(second, other, *second.parts(whole, other, ()))
        for other in collective.ranges.keys() - {self.instance}:
            self._send(second, other, *second.parts(whole, self.instance, ()))
        return second

    def _first_done(self, exchanges: Sequence[Exchange]) -> Exchange:
        """Replicas here that took different branches: one group's end may be what another waits
        for, elsewhere.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(len(self.local), thread_name_prefix="fabric")
        waits_of = {}
        for collective in exchanges:
            collective.done = collective.done or self._pool.submit(self._results, collective)
            waits_of[collective.done] = collective
        done, _ = wait(waits_of, return_when=FIRST_COMPLETED)
        return min(
            (waits_of[future] for future in done), key=lambda collective: collective.first.members
        )

    def broadcast(
        self, value: torch.Tensor | None, like: torch.Tensor, replica: int
    ) -> torch.Tensor:
        """A replica's tensor in every process. Collective; ``value`` where the replica lives, None
        elsewhere.

        Patient: one process may write what it has read to a disk meanwhile.
        """
        whole = torch.empty_like(like) if value is None else value.contiguous()
        if whole.numel():
            flat = as_bytes(whole.detach()).numpy()
            exchange.broadcast(flat, self.instance_of(replica), "reading variables")
        return whole


def _apart(communicator: Communicator, arrival: Arrival) -> Any:
    """What a member gets by its device's collective."""
    try:
        return arrival.apart(communicator, *arrival.operands)
    except RuntimeError as error:
        raise TransferError(str(error)) from None


def _waits(exchanges: Sequence[Exchange]) -> str:
    """The places where this process's replicas wait, in words."""
    return waits(
        {
            member: arrival
            for collective in exchanges
            for member, arrival in collective.arrivals.items()
        }
    )
