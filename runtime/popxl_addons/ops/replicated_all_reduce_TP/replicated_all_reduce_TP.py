"""All-reduces of tensor-parallel layers, each with the gradient that its place in the layer calls
for.

A group of one member is the identity and adds no op.
"""

import popxl
from popart import popart_exception
from popxl import ReplicaGrouping, Tensor, ops
from popxl.ops.collectives import CollectiveOps

from popxl_addons.ops.own_gradient import Rule, with_gradient


def _checked_group(where: str, op: CollectiveOps, group: ReplicaGrouping | None) -> ReplicaGrouping:
    if op != "add":
        raise popart_exception(
            f"{where}: got op {op!r}; expected 'add', the one whose gradient is defined."
        )
    return popxl.gir().replica_grouping() if group is None else group


def _summed_over(group: ReplicaGrouping) -> Rule:
    return lambda dy, *_, **__: ops.collectives.replicated_all_reduce(dy, "add", group)


def replicated_all_reduce_identical_inputs(
    t: Tensor, op: CollectiveOps = "add", group: ReplicaGrouping | None = None
) -> Tensor:
    """``t`` itself; its gradient is summed over the group.

    For entering a sharded computation with a value that is the same on every member, each of which
    makes a part of the gradient. popart_exception for an op other than "add".
    """
    group = _checked_group("replicated_all_reduce_identical_inputs", op, group)
    if group.group_size == 1:
        return t
    arguments = {"t": t, "output_name": None}
    return with_gradient(ops.identity, arguments, _summed_over(group))


def replicated_all_reduce_identical_grad_inputs(
    t: Tensor, op: CollectiveOps = "add", group: ReplicaGrouping | None = None
) -> Tensor:
    """Sum over the group; its gradient passes unchanged.

    For leaving a sharded computation: what follows is the same on every member, and so is its
    gradient. popart_exception for an op other than "add".
    """
    group = _checked_group("replicated_all_reduce_identical_grad_inputs", op, group)
    if group.group_size == 1:
        return t
    arguments = {"t": t, "op": op, "group": group}
    return with_gradient(ops.collectives.replicated_all_reduce, arguments, lambda dy, *_, **__: dy)


def replicated_all_reduce(
    t: Tensor, op: CollectiveOps = "add", group: ReplicaGrouping | None = None
) -> Tensor:
    """Sum over the group, and the gradient is summed as well. popart_exception for an op other than
    "add".
    """
    group = _checked_group("replicated_all_reduce", op, group)
    if group.group_size == 1:
        return t
    arguments = {"t": t, "op": op, "group": group}
    return with_gradient(ops.collectives.replicated_all_reduce, arguments, _summed_over(group))
