"""All-reduces over a group with any stride."""

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


def replicated_all_reduce_strided(
    t: Tensor, op: CollectiveOps = "add", group: ReplicaGrouping | None = None
) -> Tensor:
    """Reduce over the group, with a gradient for "add": the sum of the members' gradients."""
    if op == "add":
        return replicated_all_reduce(t, op, group)
    return ops.collectives.replicated_all_reduce(t, op, group)


def replicated_all_reduce_strided_identical_inputs(
    t: Tensor, op: CollectiveOps = "add", group: ReplicaGrouping | None = None
) -> Tensor:
    """The same as `replicated_all_reduce_identical_inputs`."""
    return replicated_all_reduce_identical_inputs(t, op, group)


def replicated_all_reduce_strided_identical_grad_inputs(
    t: Tensor, op: CollectiveOps = "add", group: ReplicaGrouping | None = None
) -> Tensor:
    """The same as `replicated_all_reduce_identical_grad_inputs`."""
    return replicated_all_reduce_identical_grad_inputs(t, op, group)


def replicated_all_reduce_strided_graph(
    tensors: NamedTensors,
    op: CollectiveOps = "add",
    group: ReplicaGrouping | None = None,
    use_io_tiles: bool = False,
) -> tuple[GraphWithNamedArgs, list[str]]:
    """A graph that all-reduces every named tensor: (graph, names of its outputs, sorted)."""
    names, found = tensors.unpack()
    graph = popxl.gir().create_empty_graph("all_reduce")
    inputs = []
    with graph:
        for name, t in zip(names, found):
            inputs.append(
                popxl.graph_input(t.shape, t.dtype, name, meta_shape=t.meta_shape or None)
            )
        with popxl.io_tiles() if use_io_tiles else null_context():
            for t in inputs:
                popxl.graph_output(replicated_all_reduce_strided(t, op, group))
    return GraphWithNamedArgs(graph, NamedTensors.pack(names, inputs)), names
