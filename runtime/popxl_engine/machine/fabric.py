"""Collectives over several processes: what members of a group in other processes contribute.

Where each replica has a process and a GPU of its own, the GPUs' collectives serve (`communicator`).
Elsewhere each process sends what its replicas bring to the processes that need it, through host
memory, and runs the same kernel on the operands of all members in group order. So the numbers do
not depend on which process a replica lives in.

Messages go from process to process, are posted as soon as a group's replicas in a process have
arrived, and carry the collective's site and the group as their tag. So nobody waits for anything
but the members of its own group.
"""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from popdist import exchange
from popdist.messages import Transfer, TransferError

from popxl_engine.machine.arrival import Arrival, waits
from popxl_engine.machine.communicator import Communicator, as_bytes, make_communicators

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
    done: "Future[dict[int, Any]] | None" = None
    """The results, where a thread waits for them."""

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
            return Exchange(arrivals, [], {})
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

    def finish(self, abroad: dict[tuple[int, ...], Exchange]) -> dict[int, Any]:
        """Wait for one of the exchanges, take it out, and return its results by replica.

        Where all are at one site of the program, the order is that of their groups; else the first
        that is done.
        """
        exchanges = list(abroad.values())
        with exchange.reaching_others(lambda: _waits(exchanges), TransferError):
            sites = {collective.first.site_index for collective in exchanges}
            members = min(abroad) if len(sites) == 1 else self._first_done(abroad)
            collective = abroad[members]
            results = (
                self._results(collective) if collective.done is None else collective.done.result()
            )
        del abroad[members]
        return results

    def _results(self, collective: Exchange) -> dict[int, Any]:
        """Wait for an exchange and combine: results of the members in this process."""
        if self.communicators is not None:
            return self._communicated(collective, self.communicators[collective.first.members])
        collective.wait()
        first, members = collective.first, collective.first.members
        if collective.ranges:
            return self._joined(collective)
        results = first.combine(*([operand[m] for m in members] for operand in collective.operands))
        return {m: results[members.index(m)].to(self.device) for m in collective.arrivals}

    @staticmethod
    def _communicated(collective: Exchange, communicator: Communicator) -> dict[int, Any]:
        """Let the devices do it. There is one member in each process."""
        try:
            return {m: a.apart(communicator, *a.operands) for m, a in collective.arrivals.items()}
        except RuntimeError as error:
            raise TransferError(str(error)) from None

    def _joined(self, collective: Exchange) -> dict[int, Any]:
        """Reduce this process's range of the elements, give it to the others, and take theirs."""
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
        with exchange.reaching_others(f"at {collective.first.describe}", TransferError):
            for other in collective.ranges.keys() - {self.instance}:
                self._receive(second, other, *second.parts(whole, other, ()))
            for other in collective.ranges.keys() - {self.instance}:
                self._send(second, other, *second.parts(whole, self.instance, ()))
        second.wait()
        return dict.fromkeys(collective.arrivals, whole.to(self.device))

    def _first_done(self, abroad: dict[tuple[int, ...], Exchange]) -> tuple[int, ...]:
        """Replicas here that took different branches: one group's end may be what another waits
        for, elsewhere.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(len(self.local), thread_name_prefix="fabric")
        waits_of = {}
        for members, collective in abroad.items():
            collective.done = collective.done or self._pool.submit(self._results, collective)
            waits_of[collective.done] = members
        done, _ = wait(waits_of, return_when=FIRST_COMPLETED)
        return min(waits_of[future] for future in done)

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


def _waits(exchanges: Sequence[Exchange]) -> str:
    """The places where this process's replicas wait, in words."""
    return waits(
        {
            member: arrival
            for collective in exchanges
            for member, arrival in collective.arrivals.items()
        }
    )
