"""Sums of 16-bit numbers in float32, over the replicas of a group: each member's operand travels in
its own type, and the result is not rounded. Programs call these ops by `popxl.extensions`.
"""

from popxl import dtypes
from popxl.errors import DTypeError
from popxl.opdef import Cost, op
from popxl.ops.casting import WIDE
from popxl.ops.collectives.reductions import CollectiveOps, check_reduction, resolve_group
from popxl.ops.collectives.replicated import Group, shard_length
from popxl.replica_grouping import ReplicaGrouping
from popxl.tensor import Tensor, TensorSpec


def _checked(name: str, t: Tensor, op: CollectiveOps, group: ReplicaGrouping | None) -> int:
    """The group's size, of arguments that fit."""
    check_reduction(name, t, op)
    if t.dtype not in WIDE:
        raise DTypeError(
            f"{name}: got t {t.spec}; expected float16, bfloat16 or float32. Cast it with ops.cast."
        )
    return resolve_group(name, t, group).group_size


@op(effects=("collective",), differentiable=False, names="{t}_all_reduce")
def wide_all_reduce(
    t: Tensor, op: CollectiveOps = "add", group: ReplicaGrouping | None = None
) -> TensorSpec:
    """Reduce over the group as `replicated_all_reduce` does; every member gets the result in
    float32.

    Shapes: t [a], float16, bfloat16 or float32 -> [a], float32.
    Args:
        group: default: all replicas.
    Raises:
        ValueError: for an unknown reduction, or a group of another Ir.
        DTypeError: for another type.
    """
    _checked("wide_all_reduce", t, op, group)
    return TensorSpec(t.shape, dtypes.float32)


@wide_all_reduce.cost
def wide_all_reduce_cost(y: Tensor, t: Tensor, op: str, group: Group) -> Cost:
    """Two passes of a ring: of what is reduced, and of the result."""
    size = resolve_group("wide_all_reduce", t, group).group_size
    return Cost(flops=t.nelms, bytes=(t.spec.nbytes + y.spec.nbytes) * (size - 1) // size)


@op(effects=("collective",), differentiable=False, names="{t}_reduce_scattered")
def wide_reduce_scatter(
    t: Tensor, op: CollectiveOps = "add", group: ReplicaGrouping | None = None
) -> TensorSpec:
    """Reduce over the group as `replicated_reduce_scatter` does; each member keeps its shard of the
    result in float32.

    Shapes: t [a], float16, bfloat16 or float32 -> [ceil(elements / group size)] with meta_shape a,
        float32.
    Args:
        group: default: all replicas.
    Raises:
        ValueError: for an unknown reduction, or a group of another Ir.
        DTypeError: for another type.
    """
    size = _checked("wide_reduce_scatter", t, op, group)
    return TensorSpec((shard_length(t.nelms, size),), dtypes.float32, t.shape)


@wide_reduce_scatter.cost
def wide_reduce_scatter_cost(y: Tensor, t: Tensor, op: str, group: Group) -> Cost:
    """One pass of a ring, which moves shards of what is reduced, with their padding."""
    size = resolve_group("wide_reduce_scatter", t, group).group_size
    return Cost(flops=t.nelms, bytes=(size - 1) * y.nelms * t.dtype.itemsize)
