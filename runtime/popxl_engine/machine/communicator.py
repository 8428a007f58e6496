"""A member's way to its group where every replica has a process and a device of its own: the
devices' collectives.

NCCL on GPUs. Any backend of `torch.distributed` with the same calls serves; Gloo has them for host
tensors.
"""

import logging
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as distributed
from popdist import exchange

from popxl_engine.machine.groups import make_group

logger = logging.getLogger("popxl")

BACKENDS: dict[str, str] = {"cuda": "nccl"}
"""device type -> what carries its collectives. Others exchange operands through host memory, see
`by_messages`.
"""
SINGLE = {
    "all_gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
}
"""What torch calls them, from 2.13 on and before."""


@dataclass(frozen=True)
class Seat:
    """A member's position in its group."""

    size: int
    position: int


@dataclass(frozen=True)
class Communicator(Seat):
    """The collectives of one group. All members call them in the same order, with operands of one
    shape and type.
    """

    group: Any

    def gather(self, t: torch.Tensor) -> torch.Tensor:
        """Every member's tensor: [size, *t.shape]."""
        whole = t.new_empty((self.size, *t.shape))
        if t.numel():
            self._named("all_gather")(as_bytes(whole), as_bytes(t.contiguous()), group=self.group)
        return whole

    def reduce(self, t: torch.Tensor, how: str) -> None:
        """Reduce in place. ``how``: a name of `torch.distributed.ReduceOp`."""
        if t.numel():
            distributed.all_reduce(t, getattr(distributed.ReduceOp, how), group=self.group)

    def reduce_scatter(self, t: torch.Tensor, how: str) -> torch.Tensor:
        """This member's part, by position, of the reduced tensors: t [size * n] -> [n]."""
        part = t.new_empty(t.numel() // self.size)
        if t.numel():
            reduction = getattr(distributed.ReduceOp, how)
            self._named("reduce_scatter")(part, t, reduction, group=self.group)
        return part

    def exchange(self, t: torch.Tensor) -> torch.Tensor:
        """Every member's part for this one, by position: t [size * n] -> [size, n]."""
        parts = t.new_empty((self.size, t.numel() // self.size))
        if t.numel():
            mine = as_bytes(t.contiguous())
            distributed.all_to_all_single(as_bytes(parts), mine, group=self.group)
        return parts

    def _named(self, collective: str) -> Any:
        """The form of a collective that takes one tensor for all members."""
        names = SINGLE[collective]
        return getattr(distributed, next(name for name in names if hasattr(distributed, name)))


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory. One element alone is contiguous whatever its stride is."""
    return t.as_strided((t.numel(),), (1,)).view(torch.uint8)


@dataclass(frozen=True)
class Home:
    """What a process tells the others of where its replicas compute."""

    device_type: str
    identity: str | None
    """The identity of a GPU, anywhere; None for a processor."""
    replicas: int


def home(device: torch.device, replicas: int) -> Home:
    """The home of this process."""
    identity = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    return Home(device.type, identity, replicas)


def shared_devices(homes: Sequence[Home]) -> str | None:
    """Why replicas have no device of their own, in words; None: each has one.

    Raises:
        RuntimeError: processes compute on devices of different types.
    """
    types = {h.device_type: instance for instance, h in reversed(list(enumerate(homes)))}
    if len(types) > 1:
        found = ", ".join(
            f"{kind!r} in instance {instance}" for kind, instance in sorted(types.items())
        )
        raise RuntimeError(
            f"Session: got devices {found}; expected one type in all instances. Name it (device=)."
        )
    if homes[0].replicas > 1:
        return f"each instance runs {homes[0].replicas} replicas"
    first: dict[str, int] = {}
    for instance, h in enumerate(homes):
        if h.identity is not None and first.setdefault(h.identity, instance) != instance:
            return f"instances {first[h.identity]} and {instance} share a GPU"
    return None


def make_communicators(
    device: torch.device, local: Sequence[int], groups: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], Communicator] | None:
    """A communicator for each group that this process's replica is in; None where collectives go
    through the host.

    Every process makes those of all groups, in the same order, before any of them is used.

    Args:
        local: replicas of this process.
        groups: of the replicas of all processes, sorted.
    Raises:
        RuntimeError: processes compute on devices of different types.
    """
    homes = exchange.gather_patiently(astuple(home(device, len(local))), "comparing devices")
    reason = shared_devices([Home(*each) for each in homes])
    if device.type not in BACKENDS:
        return None
    if reason is not None:
        if local[0] == 0:
            logger.warning(
                "collectives: got replicas that share devices (%s); expected one for each, as %s "
                "needs. They go through host memory. Start one instance for each GPU, with one "
                "replica (poprun --num-instances).",
                reason,
                BACKENDS[device.type].upper(),
            )
        return None
    found = {}
    for members in groups:
        group = make_group(members, BACKENDS[device.type])
        if local[0] in members:
            seat = len(members), members.index(local[0])
            found[members] = Communicator(*seat, group)
    return found
