"""Reduce-scatter over a group with any stride."""

from popxl import ReplicaGrouping, Tensor, ops
from popxl.ops.collectives import CollectiveOps


def replicated_reduce_scatter_strided(
    t: Tensor,
    op: CollectiveOps = "add",
    group: ReplicaGrouping | None = None,
    configure_output_for_replicated_tensor_sharding: bool = False,
) -> Tensor:
    """Reduce over the group and keep this member's 1-D piece; with meta_shape if configured."""
    return ops.collectives.replicated_reduce_scatter(
        t, op, group, configure_output_for_replicated_tensor_sharding
    )
