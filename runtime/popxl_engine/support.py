"""What generated source calls beside kernels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from popxl.opdef import Op

from popxl_engine.interpreter import group_members, kernel_apart
from popxl_engine.kernels.collectives import READS, Reduction, pairing, reduction
from popxl_engine.kernels.registry import Kernel
from popxl_engine.machine.arrival import Arrival


def to_host(result: Any, dtype: Any) -> np.ndarray:
    """What a host rule returned, as an array of the op's dtype."""
    return np.asarray(result, dtype=dtype)


def copied(result: Any, dtype: Any) -> np.ndarray:
    """The same as `to_host`, in memory of its own."""
    return np.array(result, dtype=dtype, order="C")


def to_device(value: np.ndarray) -> torch.Tensor:
    """A host value as a tensor of its own."""
    return torch.from_numpy(np.array(value, order="C"))


@cache
def uploader(device: torch.device) -> Callable[[np.ndarray], torch.Tensor]:
    """What makes of a host value a tensor of its own on a device.

    It does not wait for the device: CUDA has taken the value from memory that is not page-locked
    when the call returns.
    """
    if device.type == "cpu":
        return to_device
    return lambda value: to_device(value).to(device, non_blocking=True)


def making_on(device: torch.device, kernel: Kernel) -> Kernel:
    """A kernel that has no operands to tell it where its results are to be: on a device."""
    if device.type == "cpu":
        return kernel

    def make(*args: Any, **kwargs: Any) -> Any:
        with device:
            return kernel(*args, **kwargs)

    return make


def downloaded(t: torch.Tensor) -> np.ndarray:
    """A tensor's elements on the host, in memory of their own: it waits for them. Zeros where t has
    no memory.
    """
    return np.array(t.cpu().numpy(), order="C") if not t.is_meta else np.zeros(t.shape, np.uint32)


def clone(t: torch.Tensor) -> torch.Tensor:
    """A copy whose elements lie next to each other in order, whatever t's strides are."""
    return t.clone(memory_format=torch.contiguous_format)


def viewed(result: Any, source: Any) -> Any:
    """The result of an alias form whose storage is written: it must share storage with its source.

    `emulate_views` has seen to that; a kernel that breaks it must not go unnoticed.
    """
    if isinstance(result, np.ndarray):
        shares = not result.size or np.shares_memory(result, source)
    else:
        shares = (
            not result.numel()
            or result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
        )
    if not shares:
        raise RuntimeError(
            f"got a view of shape {list(result.shape)} of a tensor of shape {list(source.shape)} "
            "whose elements do not lie in memory in that order; expected a view without a copy, "
            "because it is written through. Use the out-of-place form."
        )
    return result


@dataclass(eq=False)
class CollectiveSite:
    """A collective of the program, where the replicas of a group meet."""

    op: Op
    site_index: int
    """The index among the collectives of the program, the same in every process."""

    @cached_property
    def describe(self) -> str:
        """The op and where it was built."""
        return f"{self.op} built at {self.op.where}"

    @cached_property
    def members(self) -> list[tuple[int, ...]]:
        """The replicas that each replica meets here, in group order."""
        return [
            group_members(self.op, replica)
            for replica in range(self.op.graph.ir.replication_factor)
        ]

    @cached_property
    def apart(self) -> Callable[..., torch.Tensor]:
        """The kernel as one member sees it."""
        return kernel_apart(self.op)

    @cached_property
    def reduction(self) -> Reduction | None:
        """How it reduces operands, or parts of them."""
        return reduction(self.op.definition.name, self.op.arguments.get("op"))

    def arrive(self, replica: Any, operands: Sequence[torch.Tensor], combine: Any) -> Arrival:
        """This replica's arrival."""
        reads = READS.get(self.op.definition.name, "all")
        members = self.members[replica.index]
        if reads != "own":
            replica.traffic.count_collective(self.op.definition.name, members, operands)
        arrival = Arrival(
            self, members, operands, combine, self.apart, self.describe, self.site_index, reads
        )
        arrival.reduce = self.reduction
        return arrival

    def begin(self, replica: Any, operands: Sequence[torch.Tensor], combine: Any) -> Arrival:
        """The arrival of a replica that goes on: it is given what it waits for at the end."""
        arrival = self.arrive(replica, operands, combine)
        arrival.goes_on = True
        return arrival

    def donate(self, replica: Any, operands: list[torch.Tensor], combine: Any) -> Arrival:
        """The same, where the replica holds its operand in that list alone."""
        arrival = self.arrive(replica, operands, combine)
        arrival.pair = pairing(self.op.definition.name, self.op.arguments["op"])
        return arrival
