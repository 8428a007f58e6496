"""Collectives by messages through host memory, for any number of replicas in a process.

Each process sends what its replicas bring to the processes that need it, and runs the same kernel
on the operands of all members in group order. So the numbers do not depend on which process a
replica lives in.

Messages go from process to process, are posted as soon as a group's replicas in a process have
arrived, and carry the run, the collective's site and the group as their tag. So nobody waits for
anything but the members of its own group, and nobody takes what belongs to another run or program.
Where replicas go on meanwhile, a thread moves them (`mover`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from popdist import exchange
from popdist.messages import Transfer

from popxl_engine.machine.arrival import Arrival
from popxl_engine.machine.communicator import as_bytes
from popxl_engine.machine.mover import mover
from popxl_engine.machine.transport import Exchange

HOST = torch.device("cpu")
TAGS = 2**31
"""Tags of the messages of a run are below."""
RUNS = 2**31
"""How many runs have tags of their own, before those of the first come again. All are below those
of `exchange`.
"""
SPLIT_BYTES = 2**16
"""Reductions from this size on are split over the processes of the group: one more message, each
shorter.
"""


@dataclass(frozen=True)
class Placement:
    """The processes of replicas.

    replicas: number over all processes, which hold equal, consecutive shares. local: those of this
    process.
    """

    replicas: int
    local: range

    def instance_of(self, replica: int) -> int:
        """The process that a replica lives in."""
        return replica // len(self.local)

    @property
    def instance(self) -> int:
        """This process."""
        return self.instance_of(self.local[0])

    def homes(self, members: Sequence[int]) -> dict[int, list[int]]:
        """Processes of a group, each with its members."""
        homes: dict[int, list[int]] = {}
        for member in members:
            homes.setdefault(self.instance_of(member), []).append(member)
        return dict(sorted(homes.items()))

    def others(self, homes: dict[int, list[int]]) -> list[int]:
        """The other processes of a group, those after this one first: each begins with another, so
        that no link carries everything at a time.
        """
        found = [other for other in homes if other != self.instance]
        return sorted(found, key=lambda other: (other < self.instance, other))


class ByMessages:
    """Collectives by messages.

    Args:
        placement: of the program's replicas.
        device: where their tensors are.
    """

    def __init__(self, placement: Placement, device: torch.device):
        self._placement, self._device = placement, device

    def begin(self, arrivals: dict[int, Arrival], run: int) -> "MessageExchange":
        """Post what this process's members of a group bring, and what they need of the others."""
        collective = MessageExchange(arrivals, self._placement, self._device, run)
        collective.post()
        if any(arrival.goes_on for arrival in arrivals.values()):
            mover().move(collective.mail, collective.advance)
        return collective


class Mail:
    """Messages of one tag with other processes, under way."""

    def __init__(self, tag: int):
        self._tag, self._messages = tag, exchange.connect().messages
        self._incoming: list[tuple[torch.Tensor, Sequence[torch.Tensor]]] = []
        """Messages, and what each fills, as bytes."""
        self._transfers: list[Transfer] = []

    def receive(self, other: int, targets: Sequence[torch.Tensor]) -> None:
        """Begin to receive a message that fills these bytes."""
        size = sum(t.numel() for t in targets)
        if size:
            message = targets[0] if len(targets) == 1 else targets[0].new_empty(size)
            self._transfers.append(self._messages.receive(other, self._tag, message.numpy()))
            self._incoming.append((message, targets))

    def send(self, other: int, pieces: Sequence[torch.Tensor]) -> None:
        """Begin to send bytes, as one message."""
        if any(piece.numel() for piece in pieces):
            message = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
            self._transfers.append(self._messages.send(other, self._tag, message.numpy()))

    def wait(self) -> None:
        """Wait until everything is received and sent, and put the parts of each message in their
        places.
        """
        self._messages.wait(self._transfers, exchange.seconds())
        for message, targets in self._incoming:
            if len(targets) > 1:
                for target, part in zip(targets, message.split([t.numel() for t in targets])):
                    target.copy_(part)

    @property
    def has_moved(self) -> bool:
        """Whether nothing more moves by itself, be it that another process is gone."""
        return all(t.is_done or t.link.problem is not None for t in self._transfers)


class MessageExchange(Exchange):
    """One group's collective by messages."""

    def __init__(
        self, arrivals: dict[int, Arrival], placement: Placement, device: torch.device, run: int
    ):
        super().__init__(arrivals)
        self._placement, self._device, self._run = placement, device, run
        self._homes = placement.homes(self.first.members)
        self._operands: list[dict[int, torch.Tensor]] = [
            {m: a.operands[i].to(HOST).contiguous() for m, a in arrivals.items()}
            for i in range(len(self.first.operands))
        ]
        """The operands, each as every member has it. Those of other processes are filled as far as
        this one needs them.
        """
        self._ranges = self._split()
        """The range of the elements that each process reduces for all, by process."""
        self.mail = Mail(self._tag())
        self._pieces: dict[tuple[int, int], torch.Tensor] = {}
        """What members of other processes bring for the shard of one here, by both."""
        self._second = Mail(self._tag())
        """Messages of the ranges of a large reduction, from those who reduce them."""
        self._whole: torch.Tensor | None = None
        """Its result."""
        self._is_reduced = False
        """Whether this process has reduced its range."""
        self._lock = Lock()

    def _tag(self) -> int:
        """Groups of one site are disjoint, so that the first member tells them apart. Messages of
        processes that are out of step do not meet: they wait for each other, which is reported.
        """
        replicas, site = self._placement.replicas, self.first.site_index
        tag = site * replicas + self.first.members[0]
        if tag >= TAGS:
            raise OverflowError(
                f"collectives: got collective {site} of a program on {replicas} replicas; expected "
                f"their product below {TAGS}. Repeat graphs instead of calling them."
            )
        return self._run % RUNS * TAGS + tag

    def _split(self) -> dict[int, tuple[int, int]]:
        """The elements of a large reduction that each process reduces for all, so that less
        travels.
        """
        t = self.first.operands[0]
        if self.first.reads != "elements" or t.numel() * t.element_size() < SPLIT_BYTES:
            return {}
        length = -(-t.numel() // len(self._homes))
        bounds = [min(i * length, t.numel()) for i in range(len(self._homes) + 1)]
        return {home: (bounds[i], bounds[i + 1]) for i, home in enumerate(self._homes)}

    def post(self) -> None:
        """Make room for all that others will send, and send them what they need of ours."""
        here, others = list(self.arrivals), self._placement.others(self._homes)
        for other in others:
            targets: list[torch.Tensor] = []
            for operand in self._operands:
                for member in self._homes[other]:
                    targets += self._room(operand, member)
            self.mail.receive(other, targets)
        if self._ranges:
            assert self.first.reduce is not None
            self._whole = self.first.reduce.room(self._operands[0][here[0]])
            for other in others:
                self._second.receive(other, [self._range_of(self._whole, other)])
        for other in others:
            pieces = [
                piece
                for operand in self._operands
                for member in here
                for piece in self._parts(operand[member], other, self._homes[other])
            ]
            self.mail.send(other, pieces)

    def _room(self, operand: dict[int, torch.Tensor], member: int) -> list[torch.Tensor]:
        """Memory, as bytes, for what another process's member brings: its operand, or what it has
        of the shards of the members here.
        """
        here, like = list(self.arrivals), operand[next(iter(self.arrivals))]
        if self.first.reads != "shard":
            operand[member] = torch.empty_like(like)
            return self._parts(operand[member], self._placement.instance, here)
        for reader in here:
            self._pieces[member, reader] = torch.empty_like(self._piece(like, reader))
        return [as_bytes(self._pieces[member, reader]) for reader in here]

    def _parts(self, t: torch.Tensor, instance: int, readers: Sequence[int]) -> list[torch.Tensor]:
        """The bytes of a member's contiguous operand that a process needs for its members, as
        views.
        """
        if self._ranges:
            return [self._range_of(t, instance)]
        if self.first.reads != "shard":
            return [as_bytes(t)]
        return [as_bytes(self._piece(t, reader)) for reader in readers]

    def _piece(self, t: torch.Tensor, reader: int) -> torch.Tensor:
        """What is of a member's shard in an operand, as a view: all that there is of the last."""
        length = -(-t.numel() // len(self.first.members))
        begin = self.first.members.index(reader) * length
        return t.reshape(-1)[begin : begin + length]

    def _range_of(self, t: torch.Tensor, instance: int) -> torch.Tensor:
        """The bytes of the range that a process reduces."""
        begin, end = self._ranges[instance]
        return as_bytes(t)[begin * t.element_size() : end * t.element_size()]

    @property
    def has_moved(self) -> bool:
        """Whether nothing more moves, see `Mail`, both halves of a large reduction included."""
        return self.mail.has_moved and (not self._ranges or self._has_second_moved)

    @property
    def _has_second_moved(self) -> bool:
        return self._is_reduced and self._second.has_moved

    def advance(self) -> Mail | None:
        """Reduce this process's range of the elements of a large reduction, and begin to give it to
        the others; once. None where nothing follows.
        """
        if self._whole is None:
            return None
        with self._lock:
            if not self._is_reduced:
                self.mail.wait()
                self._reduce(self._whole)
                self._is_reduced = True
        return self._second

    def _reduce(self, whole: torch.Tensor) -> None:
        (operand,), members = self._operands, self.first.members
        begin, end = self._ranges[self._placement.instance]
        pieces = [operand[m].reshape(-1)[begin:end] for m in members]
        assert self.first.reduce is not None
        whole.reshape(-1)[begin:end] = self.first.reduce(pieces)
        for other in self._placement.others(self._homes):
            self._second.send(other, [self._range_of(whole, self._placement.instance)])

    def results(self) -> dict[int, Any]:
        """See `Exchange`. Those of a large reduction are one tensor."""
        if self._whole is not None:
            self.advance()
            self._second.wait()
            return dict.fromkeys(self.arrivals, self._whole.to(self._device))
        self.mail.wait()
        members = self.first.members
        if self.first.reads == "shard":
            return {m: self._shard(m).to(self._device) for m in self.arrivals}
        results = self.first.combine(*([t[m] for m in members] for t in self._operands))
        return {m: results[members.index(m)].to(self._device) for m in self.arrivals}

    def _shard(self, reader: int) -> torch.Tensor:
        """A member's shard of the reduced operands, of which nothing else is reduced."""
        (operand,), members = self._operands, self.first.members
        pieces = [
            self._piece(operand[m], reader) if m in operand else self._pieces[m, reader]
            for m in members
        ]
        assert self.first.reduce is not None
        found, own = self.first.reduce(pieces), self.first.operands[0]
        missing = -(-own.numel() // len(members)) - found.numel()
        return torch.cat([found, found.new_zeros(missing)]) if missing else found
