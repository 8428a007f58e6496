"""All-gather over a group with any stride."""

from popxl import ReplicaGrouping, Tensor, ops


def replicated_all_gather_strided(t: Tensor, group: ReplicaGrouping | None = None) -> Tensor:
    """Every member's tensor in one: 1-D, or in the unsharded shape when ``t`` is a shard."""
    if t.meta_shape:
        return ops.collectives.replicated_all_gather(t, group=group, output_shape="meta_shape")
    return ops.collectives.replicated_all_gather(t.flatten(), group=group, output_shape="concat")
