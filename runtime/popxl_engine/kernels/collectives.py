"""Collectives: from the list of every member's operand to the list of every member's result.

What is the same for all members is one tensor (`SHARED`), which nobody may write to; alone in its
group, a member gets a view of its operand.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from popxl.ops.collectives.replicated import shard_length

from popxl_engine.kernels.dtypes import narrowed, widened
from popxl_engine.kernels.registry import kernel
from popxl_engine.machine.tree_reduction import TreeReduction

Tensors = Sequence[torch.Tensor]

PAIRWISE: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "mean": torch.add,
    "square_add": torch.add,
    "mul": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": torch.logical_and,
    "or": torch.logical_or,
}
PIECE = 2**16
"""Elements that the processor reduces at a time: what they need beside the operands stays in its
caches.
"""


def reduce(ts: Tensors | TreeReduction, op: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Reduce by a binary tree over positions: ((0 1) (2 3)) ((4 5) 6). One operand alone is
    returned as it is.

    Args:
        dtype: of the result; default: the operands'.
    """
    if isinstance(ts, TreeReduction):
        return after_reduction(ts.whole, dtype or ts.dtype, op, len(ts))
    dtype = dtype or ts[0].dtype
    if len(ts) == 1 and op != "square_add":
        return ts[0].to(dtype)
    if ts[0].numel() <= PIECE or ts[0].is_cuda or _is_one_pass(ts, op, dtype):
        return by_tree(ts, op, dtype)
    result = torch.empty_like(ts[0], dtype=dtype, memory_format=torch.contiguous_format)
    operands = [t.reshape(-1).split(PIECE) for t in ts]
    for into, *pieces in zip(result.view(-1).split(PIECE), *operands):
        into.copy_(by_tree(pieces, op, dtype))
    return result


def _is_one_pass(ts: Tensors, op: str, dtype: torch.dtype) -> bool:
    """Whether nothing lies between the operands and the result: two of them, of its type."""
    return len(ts) == 2 and op != "square_add" and ts[0].dtype == dtype == torch.float32


def by_tree(ts: Tensors, op: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The same, all elements at a time."""
    level = [widened(t, op) for t in ts]
    if op == "square_add":
        level = [t * t for t in level]
    while len(level) > 1:
        pairs = [PAIRWISE[op](a, b) for a, b in zip(level[::2], level[1::2])]
        level = pairs + level[len(pairs) * 2 :]
    whole = level[0]
    if op == "mean":
        whole = whole.div_(len(ts)) if whole.is_floating_point() else whole / len(ts)
    return narrowed(whole, dtype or ts[0].dtype, op)


def pairing(name: str, op: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """How two neighbours in the tree of a reduction become one, where its operands may come one
    after the other.
    """
    if name not in REDUCTIONS or op == "square_add":
        return None

    def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return PAIRWISE[op](widened(a, op), widened(b, op))

    return pair


@dataclass(frozen=True)
class Reduction:
    """How a collective reduces its members' operands, or the same elements of each."""

    op: str
    dtype: torch.dtype | None
    """The type of the result; None: the operands'."""

    def __call__(self, ts: Tensors) -> torch.Tensor:
        """The operands as one."""
        return reduce(ts, self.op, self.dtype)

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for the result of operands like this one."""
        return torch.empty_like(like, dtype=self.dtype)


def reduction(name: str, op: str | None) -> Reduction | None:
    """How a collective reduces, which does it; None: it does not."""
    if op is None or READS.get(name) not in ("elements", "shard"):
        return None
    return Reduction(op, torch.float32 if name in WIDE else None)


WIDE = frozenset({"wide_all_reduce", "wide_reduce_scatter"})
"""Reductions whose result is float32 whatever their operands are."""
REDUCTIONS = frozenset({"replicated_all_reduce", "replicated_reduce_scatter"}) | WIDE
"""Reductions whose result is a new tensor."""
READS: dict[str, str] = {
    "replicated_all_reduce": "elements",
    "replicated_all_reduce_": "elements",
    "wide_all_reduce": "elements",
    "replicated_reduce_scatter": "shard",
    "wide_reduce_scatter": "shard",
    "replica_sharded_slice": "own",
    "replicated_slice": "own",
}
"""What a member's result depends on (`machine.lockstep.Reads`), where it is not everything."""
SHARED = frozenset({"replicated_all_reduce", "wide_all_reduce", "replicated_all_gather"})
"""Ops whose result is one tensor for all members: who writes to it needs a copy."""


def padded(t: torch.Tensor, count: int) -> torch.Tensor:
    """Flat, with zeros at the end until it divides into equal pieces; a view of t where it does."""
    flat, missing = t.reshape(-1), shard_length(t.numel(), count) * count - t.numel()
    return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat


def shards(t: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Equal flat pieces, the last ones padded with zeros; views of t where nothing is padded."""
    return list(padded(t, count).split(shard_length(t.numel(), count)))


@kernel("replicated_all_reduce")
def replicated_all_reduce(t: Tensors, op: str, group: Any) -> list[torch.Tensor]:
    """The reduced tensor for every member."""
    return [reduce(t, op)] * len(t)


@kernel("replicated_all_reduce_")
def replicated_all_reduce_(t: Tensors, op: str, group: Any) -> list[torch.Tensor]:
    """The reduced tensor, copied into every member's."""
    result = reduce(t, op)
    return [member.copy_(result) for member in t]


@kernel("replicated_reduce_scatter")
def replicated_reduce_scatter(
    t: Tensors, op: str, group: Any, configure_output_for_replicated_tensor_sharding: bool
) -> list[torch.Tensor]:
    """A shard of the reduced tensor for each member."""
    pieces = shards(reduce(t, op), len(t))
    return pieces if len(t) > 1 else [pieces[0].clone()]


@kernel("wide_all_reduce")
def wide_all_reduce(t: Tensors, op: str, group: Any) -> list[torch.Tensor]:
    """The reduced tensor for every member, new where each is alone."""
    result = reduce(t, op, torch.float32)
    return [result] * len(t) if len(t) > 1 else [result.clone()]


@kernel("wide_reduce_scatter")
def wide_reduce_scatter(t: Tensors, op: str, group: Any) -> list[torch.Tensor]:
    """A shard of the reduced tensor for each member."""
    pieces = shards(reduce(t, op, torch.float32), len(t))
    return pieces if len(t) > 1 else [pieces[0].clone()]


@kernel("replica_sharded_slice")
def replica_sharded_slice(t: Tensors, group: Any) -> list[torch.Tensor]:
    """Member i's shard i."""
    return [shards(member, len(t))[i] for i, member in enumerate(t)]


@kernel("replicated_slice")
def replicated_slice(t: Tensors, axis: int, group: Any) -> list[torch.Tensor]:
    """Member i's slice i."""
    pieces = [member.chunk(len(t), axis)[i] for i, member in enumerate(t)]
    return [p.squeeze(axis) for p in pieces]


@kernel("replicated_all_gather")
def replicated_all_gather(
    t: Tensors, axis: int, group: Any, output_shape: str, whole: tuple[int, ...]
) -> list[torch.Tensor]:
    """The members' tensors, joined."""
    if output_shape == "new_axis":
        joined = torch.stack(list(t)) if len(t) > 1 else t[0].unsqueeze(0)
    else:
        joined = torch.cat(list(t), axis) if len(t) > 1 else t[0]
    return [as_whole(joined, output_shape, whole)] * len(t)


def as_whole(joined: torch.Tensor, output_shape: str, whole: tuple[int, ...]) -> torch.Tensor:
    """Joined shards as the tensor that they are of; other tensors as they are."""
    return (
        joined.reshape(-1)[: math.prod(whole)].reshape(whole)
        if output_shape == "meta_shape"
        else joined
    )


@kernel("all_reduce")
def all_reduce(ts: Tensors, ipus: tuple[int, ...], op: str) -> list[torch.Tensor]:
    """The reduced tensor, once per device."""
    result = reduce(ts, op)
    return [result.clone() for _ in ts]


@kernel("all_reduce_identical_inputs")
def all_reduce_identical_inputs(ts: Tensors, ipus: tuple[int, ...], op: str) -> list[torch.Tensor]:
    """Copies."""
    return [t.clone() for t in ts]


@kernel("all_reduce_identical_grad_inputs")
def all_reduce_identical_grad_inputs(
    ts: Tensors, ipus: tuple[int, ...], op: str
) -> list[torch.Tensor]:
    """The reduced tensor, once per device."""
    return all_reduce(ts, ipus, op)


# Where each member has a process and a device of its own: from its operand to its result


class Team(Protocol):
    """A member's group, see `machine.communicator`."""

    @property
    def size(self) -> int:
        """Members."""

    @property
    def position(self) -> int:
        """Which of them this one is."""

    def gather(self, t: torch.Tensor) -> torch.Tensor:
        """Every member's tensor: [size, *t.shape]."""

    def reduce(self, t: torch.Tensor, how: str) -> None:
        """Reduce in place."""

    def reduce_scatter(self, t: torch.Tensor, how: str) -> torch.Tensor:
        """This member's part of the reduced tensors: t [size * n] -> [n]."""

    def exchange(self, t: torch.Tensor) -> torch.Tensor:
        """Every member's part for this one: t [size * n] -> [size, n]."""


APART: dict[str, Callable[..., torch.Tensor]] = {}
"""Takes the group as the member sees it, then the op's parameters. Those that read only their own
operand need no more of the group than its size and position."""
HOW = {
    **dict.fromkeys(("add", "mean", "square_add"), "SUM"),
    "mul": "PRODUCT",
    **dict.fromkeys(("min", "and"), "MIN"),
    **dict.fromkeys(("max", "or"), "MAX"),
}
REDUCED = frozenset(
    {torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
)
"""Types in which devices reduce; others are gathered."""


def apart(*names: str) -> Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]:
    """Register a member's kernel."""

    def register(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        APART.update(dict.fromkeys(names, fn))
        return fn

    return register


def before_reduction(t: torch.Tensor, op: str) -> torch.Tensor:
    """What a member brings to a reduction between devices."""
    t = t.to(torch.uint8) if t.dtype is torch.bool else widened(t, op)
    return t * t if op == "square_add" else t


def after_reduction(t: torch.Tensor, dtype: torch.dtype, op: str, size: int) -> torch.Tensor:
    """What comes of it. May change t."""
    return narrowed(t.div_(size) if op == "mean" else t, dtype, op)


@apart("replicated_all_reduce", "replicated_all_reduce_")
def all_reduce_apart(team: Team, t: torch.Tensor, op: str, group: Any) -> torch.Tensor:
    """The reduced tensor, new."""
    brought = before_reduction(t, op)
    if brought.dtype not in REDUCED:
        return reduce(list(team.gather(t)), op)
    whole = (
        brought.clone(memory_format=torch.contiguous_format)
        if brought is t
        else brought.contiguous()
    )
    team.reduce(whole, HOW[op])
    return after_reduction(whole, t.dtype, op, team.size)


@apart("replicated_reduce_scatter")
def reduce_scatter_apart(
    team: Team,
    t: torch.Tensor,
    op: str,
    group: Any,
    configure_output_for_replicated_tensor_sharding: bool,
) -> torch.Tensor:
    """The member's shard of the reduced tensor."""
    brought = before_reduction(padded(t, team.size), op)  # zeros are other numbers in another order
    if brought.dtype not in REDUCED:
        return shards(reduce(list(team.gather(t)), op), team.size)[team.position]
    piece = team.reduce_scatter(brought, HOW[op])
    return after_reduction(piece, t.dtype, op, team.size)


@apart("wide_reduce_scatter")
def wide_reduce_scatter_apart(team: Team, t: torch.Tensor, op: str, group: Any) -> torch.Tensor:
    """The member's shard of the reduced tensor. Devices would round what they reduce, so that they
    exchange the parts, and each member adds its own by the tree.
    """
    return reduce(list(team.exchange(padded(t, team.size))), op, torch.float32)


@apart("wide_all_reduce")
def wide_all_reduce_apart(team: Team, t: torch.Tensor, op: str, group: Any) -> torch.Tensor:
    """The reduced tensor, from everyone's shard of it."""
    whole = team.gather(wide_reduce_scatter_apart(team, t, op, group))
    return as_whole(whole, "meta_shape", tuple(t.shape))


@apart("replica_sharded_slice")
def sharded_slice_apart(team: Team, t: torch.Tensor, group: Any) -> torch.Tensor:
    """The member's shard."""
    return shards(t, team.size)[team.position]


@apart("replicated_slice")
def slice_apart(team: Team, t: torch.Tensor, axis: int, group: Any) -> torch.Tensor:
    """The member's slice."""
    return t.chunk(team.size, axis)[team.position].squeeze(axis)


@apart("replicated_all_gather")
def all_gather_apart(
    team: Team, t: torch.Tensor, axis: int, group: Any, output_shape: str, whole: tuple[int, ...]
) -> torch.Tensor:
    """The members' tensors, joined."""
    stacked = team.gather(t)
    if output_shape != "new_axis" and axis == 0:
        return as_whole(stacked.flatten(0, 1), output_shape, whole)
    return replicated_all_gather(list(stacked), axis, group, output_shape, whole)[0]
