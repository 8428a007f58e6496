"""Collectives: from the list of every member's operand to the list of every member's result.

What is the same for all members is one tensor (`SHARED`), which nobody may write to; alone in its group, a member gets
a view of its operand.
"""

import math
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch
from popxl.ops.collectives.replicated import shard_length

from popxl_engine.kernels.dtypes import LIMITED
from popxl_engine.kernels.registry import kernel

Tensors = Sequence[torch.Tensor]

PAIRWISE: Dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "mean": torch.add,
    "square_add": torch.add,
    "mul": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": torch.logical_and,
    "or": torch.logical_or,
}
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, **dict.fromkeys(LIMITED, torch.int64)}
"""Types in which others are reduced."""


def reduce(ts: Tensors, op: str) -> torch.Tensor:
    """Reduce by a binary tree over positions: ((0 1) (2 3)) ((4 5) 6). One operand alone is returned as it is."""
    dtype = ts[0].dtype
    if len(ts) == 1 and op != "square_add":
        return ts[0]
    level = [t.to(WIDER.get(dtype, dtype)) for t in ts]
    if op == "square_add":
        level = [t * t for t in level]
    while len(level) > 1:
        pairs = [PAIRWISE[op](a, b) for a, b in zip(level[::2], level[1::2])]
        level = pairs + level[len(pairs) * 2 :]
    result = level[0] / len(ts) if op == "mean" else level[0]
    return result.to(dtype)


READS: Dict[str, str] = {
    "replicated_all_reduce": "elements",
    "replicated_all_reduce_": "elements",
    "replicated_reduce_scatter": "shard",
    "replica_sharded_slice": "own",
    "replicated_slice": "own",
}
"""What a member's result depends on (`machine.lockstep.Reads`), where it is not everything."""
SHARED = frozenset({"replicated_all_reduce", "replicated_all_gather"})
"""Ops whose result is one tensor for all members: who writes to it needs a copy."""


def shards(t: torch.Tensor, count: int) -> List[torch.Tensor]:
    """Equal flat pieces, the last ones padded with zeros; views of t where nothing is padded."""
    length = shard_length(t.numel(), count)
    flat = t.reshape(-1)
    if length * count != flat.numel():
        flat = torch.cat([flat, flat.new_zeros(length * count - flat.numel())])
    return list(flat.split(length))


@kernel("replicated_all_reduce")
def replicated_all_reduce(t: Tensors, op: str, group: Any) -> List[torch.Tensor]:
    """The reduced tensor for every member."""
    return [reduce(t, op)] * len(t)


@kernel("replicated_all_reduce_")
def replicated_all_reduce_(t: Tensors, op: str, group: Any) -> List[torch.Tensor]:
    """The reduced tensor, copied into every member's."""
    result = reduce(t, op)
    return [member.copy_(result) for member in t]


@kernel("replicated_reduce_scatter")
def replicated_reduce_scatter(
    t: Tensors, op: str, group: Any, configure_output_for_replicated_tensor_sharding: bool
) -> List[torch.Tensor]:
    """A shard of the reduced tensor for each member."""
    pieces = shards(reduce(t, op), len(t))
    return pieces if len(t) > 1 else [pieces[0].clone()]


@kernel("replica_sharded_slice")
def replica_sharded_slice(t: Tensors, group: Any) -> List[torch.Tensor]:
    """Member i's shard i."""
    return [shards(member, len(t))[i] for i, member in enumerate(t)]


@kernel("replicated_slice")
def replicated_slice(t: Tensors, axis: int, group: Any) -> List[torch.Tensor]:
    """Member i's slice i."""
    pieces = [member.chunk(len(t), axis)[i] for i, member in enumerate(t)]
    return [p.squeeze(axis) for p in pieces]


@kernel("replicated_all_gather")
def replicated_all_gather(
    t: Tensors, axis: int, group: Any, output_shape: str, whole: Tuple[int, ...]
) -> List[torch.Tensor]:
    """The members' tensors, joined."""
    if output_shape == "new_axis":
        joined = torch.stack(list(t)) if len(t) > 1 else t[0].unsqueeze(0)
    else:
        joined = torch.cat(list(t), axis) if len(t) > 1 else t[0]
    if output_shape == "meta_shape":
        joined = joined.reshape(-1)[: math.prod(whole)].reshape(whole)
    return [joined] * len(t)


@kernel("all_reduce")
def all_reduce(ts: Tensors, ipus: Tuple[int, ...], op: str) -> List[torch.Tensor]:
    """The reduced tensor, once per device."""
    result = reduce(ts, op)
    return [result.clone() for _ in ts]


@kernel("all_reduce_identical_inputs")
def all_reduce_identical_inputs(ts: Tensors, ipus: Tuple[int, ...], op: str) -> List[torch.Tensor]:
    """Copies."""
    return [t.clone() for t in ts]


@kernel("all_reduce_identical_grad_inputs")
def all_reduce_identical_grad_inputs(ts: Tensors, ipus: Tuple[int, ...], op: str) -> List[torch.Tensor]:
    """The reduced tensor, once per device."""
    return all_reduce(ts, ipus, op)
