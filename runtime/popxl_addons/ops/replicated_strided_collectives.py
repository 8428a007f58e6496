"""Collectives over groups with any stride. PopXL's own take them as they are here; these are the add-ons' names."""

from typing import List, Optional, Tuple

import popxl
from popxl import ReplicaGrouping, Tensor, ops
from popxl.ops.collectives import CollectiveOps

from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.ops.replicated_all_reduce_TP import (
    replicated_all_reduce,
    replicated_all_reduce_identical_grad_inputs,
    replicated_all_reduce_identical_inputs,
)
from popxl_addons.utils import null_context


def replicated_all_gather_strided(t: Tensor, group: Optional[ReplicaGrouping] = None) -> Tensor:
    """Every member's tensor in one: 1-D, or in the unsharded shape when ``t`` is a shard."""
    if t.meta_shape:
        return ops.collectives.replicated_all_gather(t, group=group, output_shape="meta_shape")
    return ops.collectives.replicated_all_gather(t.flatten(), group=group, output_shape="concat")


def replicated_reduce_scatter_strided(
    t: Tensor,
    op: CollectiveOps = "add",
    group: Optional[ReplicaGrouping] = None,
    configure_output_for_replicated_tensor_sharding: bool = False,
) -> Tensor:
    """Reduce over the group and keep this member's 1-D piece; with meta_shape if configured."""
    return ops.collectives.replicated_reduce_scatter(t, op, group, configure_output_for_replicated_tensor_sharding)


def replicated_all_reduce_strided(
    t: Tensor, op: CollectiveOps = "add", group: Optional[ReplicaGrouping] = None
) -> Tensor:
    """Reduce over the group, with a gradient for "add": the sum of the members' gradients."""
    if op == "add":
        return replicated_all_reduce(t, op, group)
    return ops.collectives.replicated_all_reduce(t, op, group)


def replicated_all_reduce_strided_identical_inputs(
    t: Tensor, op: CollectiveOps = "add", group: Optional[ReplicaGrouping] = None
) -> Tensor:
    """As `replicated_all_reduce_identical_inputs`."""
    return replicated_all_reduce_identical_inputs(t, op, group)


def replicated_all_reduce_strided_identical_grad_inputs(
    t: Tensor, op: CollectiveOps = "add", group: Optional[ReplicaGrouping] = None
) -> Tensor:
    """As `replicated_all_reduce_identical_grad_inputs`."""
    return replicated_all_reduce_identical_grad_inputs(t, op, group)


def replicated_all_reduce_strided_graph(
    tensors: NamedTensors,
    op: CollectiveOps = "add",
    group: Optional[ReplicaGrouping] = None,
    use_io_tiles: bool = False,
) -> Tuple[GraphWithNamedArgs, List[str]]:
    """A graph that all-reduces every named tensor: (graph, names of its outputs, sorted)."""
    names, found = tensors.unpack()
    graph = popxl.gir().create_empty_graph("all_reduce")
    inputs = []
    with graph:
        for name, t in zip(names, found):
            inputs.append(popxl.graph_input(t.shape, t.dtype, name, meta_shape=t.meta_shape or None))
        with popxl.io_tiles() if use_io_tiles else null_context():
            for t in inputs:
                popxl.graph_output(replicated_all_reduce_strided(t, op, group))
    return GraphWithNamedArgs(graph, NamedTensors.pack(names, inputs)), names
