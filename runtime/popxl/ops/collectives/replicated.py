"""Collectives over the replicas of a group, of any `ReplicaGrouping`. Member i of a group is the
i-th in increasing order of replicas.

Shards follow one layout: flatten row-major, pad with zeros at the end, cut into group-size equal
pieces; member i holds piece i.
"""

from typing import Any, Literal

import numpy as np

from popxl.errors import ShapeError
from popxl.opdef import Cost, inplace, op
from popxl.ops.checks import normalise_axis
from popxl.ops.collectives.reductions import CollectiveOps, check_reduction, resolve_group
from popxl.ops.shape import reshape
from popxl.replica_grouping import ReplicaGrouping
from popxl.tensor import Tensor, TensorSpec

OutputShape = Literal["new_axis", "concat", "meta_shape", "auto"]
Group = ReplicaGrouping | None


def shard_length(elements: int, group_size: int) -> int:
    """Elements in each member's shard: the last shards are padded."""
    return -(-elements // group_size)


@op(effects=("collective",), views=("t",), differentiable=False, names="{t}_all_reduce")
def replicated_all_reduce(
    t: Tensor, op: CollectiveOps = "add", group: ReplicaGrouping | None = None
) -> TensorSpec:
    """Reduce over the group, element by element; every member gets the result.

    The order of additions is a fixed binary tree over the members' positions; 16-bit types add in
    float32.

    Shapes: t [a] -> [a], t's dtype.
    Args:
        group: default: all replicas.
    Raises:
        ValueError: for an unknown reduction, or a group of another Ir.
        DTypeError: from sessions, for a reduction that t's dtype does not have.
    """
    check_reduction("replicated_all_reduce", t, op)
    resolve_group("replicated_all_reduce", t, group)
    return t.spec


replicated_all_reduce_ = inplace(replicated_all_reduce, "t")


@replicated_all_reduce.cost
def replicated_all_reduce_cost(y: Tensor, t: Tensor, op: str, group: Group) -> Cost:
    """Two passes of a ring."""
    size = resolve_group("replicated_all_reduce", t, group).group_size
    return Cost(flops=t.nelms, bytes=2 * t.spec.nbytes * (size - 1) // size)


@op(effects=("collective",), differentiable=False, names="{t}_reduce_scattered")
def replicated_reduce_scatter(
    t: Tensor,
    op: CollectiveOps = "add",
    group: ReplicaGrouping | None = None,
    configure_output_for_replicated_tensor_sharding: bool = False,
) -> TensorSpec:
    """Reduce over the group; each member keeps its shard of the result.

    Shapes: t [a] -> [ceil(elements / group size)], t's dtype.
    Args:
        group: default: all replicas.
        configure_output_for_replicated_tensor_sharding: give the result t's shape as its
            meta_shape.
    Raises:
        ValueError: for an unknown reduction, or a group of another Ir.
        DTypeError: from sessions, for a reduction that t's dtype does not have.
    """
    check_reduction("replicated_reduce_scatter", t, op)
    size = resolve_group("replicated_reduce_scatter", t, group).group_size
    meta_shape = t.shape if configure_output_for_replicated_tensor_sharding else ()
    return TensorSpec((shard_length(t.nelms, size),), t.dtype, meta_shape)


@replicated_reduce_scatter.cost
def replicated_reduce_scatter_cost(
    y: Tensor, t: Tensor, op: str, group: Group, configure: bool
) -> Cost:
    """One pass of a ring, which moves shards with their padding."""
    size = resolve_group("replicated_reduce_scatter", t, group).group_size
    return Cost(flops=t.nelms, bytes=(size - 1) * y.spec.nbytes)


@op(effects=("collective",), views=("t",), names="{t}_sharded_slice")
def replica_sharded_slice(t: Tensor, group: ReplicaGrouping | None = None) -> TensorSpec:
    """This member's shard of a tensor that is the same on the whole group. Nothing is reduced.

    Shapes: t [a] -> [ceil(elements / group size)] with meta_shape a, t's dtype.
    Args:
        group: default: all replicas.
    Raises:
        ValueError: for a group of another Ir.
    """
    size = resolve_group("replica_sharded_slice", t, group).group_size
    return TensorSpec((shard_length(t.nelms, size),), t.dtype, t.shape)


@replica_sharded_slice.vjp
def replica_sharded_slice_vjp(dy: Tensor, y: Tensor, t: Tensor, group: Group) -> Tensor:
    """Gather the members' gradients."""
    return _all_gather(dy, 0, group, "meta_shape", t.shape)


@op(effects=("collective",), views=("t",), names="{t}_replicated_slice")
def replicated_slice(t: Tensor, axis: int = 0, group: ReplicaGrouping | None = None) -> TensorSpec:
    """This member's equal slice of an axis, which is dropped when the slice has size 1.

    Shapes: t [a.., n, b..] -> [a.., n / group size, b..] or [a.., b..], t's dtype.
    Args:
        group: default: all replicas.
    Raises:
        ValueError: if the group's size does not divide the axis, or for an axis that t lacks.
    """
    size = resolve_group("replicated_slice", t, group).group_size
    axis = normalise_axis("replicated_slice", t, axis)
    if t.shape[axis] % size:
        raise ShapeError(
            f"replicated_slice: got axis {axis} of t {t.spec} for a group of {size}; expected a "
            "multiple of the group's size. Pad t."
        )
    piece = t.shape[axis] // size
    return TensorSpec(
        (*t.shape[:axis], *([piece] if piece != 1 else []), *t.shape[axis + 1 :]), t.dtype
    )


@replicated_slice.vjp
def replicated_slice_vjp(dy: Tensor, y: Tensor, t: Tensor, axis: int, group: Group) -> Tensor:
    """Gather the members' gradients along the axis."""
    axis = normalise_axis("replicated_slice", t, axis)
    size = resolve_group("replicated_slice", t, group).group_size
    if t.shape[axis] == size:  # the axis was dropped
        dy = reshape(dy, (*t.shape[:axis], 1, *t.shape[axis + 1 :]))
    return _all_gather(dy, axis, group, "concat", ())


def slice_cost(y: Tensor, *arguments: Any) -> Cost:
    """Reads and writes the slice; nothing travels between replicas."""
    return Cost(bytes=2 * y.spec.nbytes)


replica_sharded_slice.cost(slice_cost)
replicated_slice.cost(slice_cost)


@op(name="replicated_all_gather", effects=("collective",), views=("t",), names="{t}_all_gathered")
def _all_gather(
    t: Tensor,
    axis: int,
    group: ReplicaGrouping | None,
    output_shape: OutputShape,
    whole: tuple[int, ...],
) -> TensorSpec:
    """Gather with a definite form of the result; ``whole`` is the unsharded shape for
    "meta_shape".
    """
    size = resolve_group("replicated_all_gather", t, group).group_size
    if output_shape == "meta_shape":
        return TensorSpec(whole, t.dtype)
    if output_shape == "new_axis":
        return TensorSpec((size, *t.shape), t.dtype)
    axis = normalise_axis("replicated_all_gather", t, axis)
    return TensorSpec((*t.shape[:axis], size * t.shape[axis], *t.shape[axis + 1 :]), t.dtype)


def replicated_all_gather(
    t: Tensor,
    axis: int = 0,
    group: ReplicaGrouping | None = None,
    output_shape: Literal["new_axis", "concat", "meta_shape", "auto"] = "auto",
) -> Tensor:
    """Join the members' tensors; every member gets the result.

    Shapes: t [a.., n, b..] -> by output_shape, t's dtype:
        "concat": [a.., n * group size, b..], joined along ``axis``.
        "new_axis": [group size, a.., n, b..].
        "meta_shape": t's meta_shape: a shard becomes the whole tensor again, without the padding.
        "auto": "meta_shape" if t has one, else "concat".
    Args:
        group: default: all replicas.
    Raises:
        ValueError: for another output_shape, an axis that is no int or that t lacks, "meta_shape"
            for a tensor that has none or that is not one of group-size shards of it, or a group of
            another Ir.
    """
    if not isinstance(t, Tensor):
        raise TypeError(
            f"replicated_all_gather: got t = {type(t).__name__}; expected a popxl.Tensor."
        )
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        raise ValueError(f"replicated_all_gather: got axis {axis!r}; expected an int.")
    if output_shape not in ("new_axis", "concat", "meta_shape", "auto"):
        raise ValueError(
            f"replicated_all_gather: got output_shape {output_shape!r}; expected 'new_axis', "
            "'concat', 'meta_shape' or 'auto'."
        )
    if output_shape == "auto":
        output_shape = "meta_shape" if t.meta_shape else "concat"
    if output_shape == "meta_shape":
        size = resolve_group("replicated_all_gather", t, group).group_size
        elements = TensorSpec(t.meta_shape, t.dtype).nelms
        if not t.meta_shape or shard_length(elements, size) != t.nelms:
            raise ShapeError(
                f"replicated_all_gather: got t {t.spec} for a group of {size}; expected a shard "
                f"of 1 / {size} of its meta_shape. Gather over the group that it was sharded over."
            )
    return _all_gather(
        t, axis, group, output_shape, t.meta_shape if output_shape == "meta_shape" else ()
    )


@_all_gather.vjp
def replicated_all_gather_vjp(
    dy: Tensor,
    y: Tensor,
    t: Tensor,
    axis: int,
    group: Group,
    output_shape: OutputShape,
    whole: tuple[int, ...],
) -> Tensor:
    """Each member keeps its own slice; nothing is summed."""
    if output_shape == "meta_shape":
        return replica_sharded_slice(dy, group)
    sliced = replicated_slice(dy, 0 if output_shape == "new_axis" else axis, group)
    return sliced if sliced.shape == t.shape else reshape(sliced, t.shape)


@_all_gather.cost
def replicated_all_gather_cost(
    y: Tensor, t: Tensor, axis: int, group: Group, output_shape: OutputShape, whole: tuple[int, ...]
) -> Cost:
    """One pass of a ring, which moves the members' tensors; shards with their padding."""
    size = resolve_group("replicated_all_gather", t, group).group_size
    return Cost(bytes=(size - 1) * t.spec.nbytes)
