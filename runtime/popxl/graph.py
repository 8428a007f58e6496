"""Graphs: ordered ops with inputs and outputs. The order in which ops were added is always a valid
order.
"""

from popxl.program import Graph

__all__ = ["Graph", "called_first"]


def called_first(*graphs: Graph) -> list[Graph]:
    """The graphs and all graphs that they call, at any depth; each once, after every graph that it
    calls.
    """
    order: dict[Graph, None] = {}
    visited: set[Graph] = set()

    def visit(g: Graph) -> None:
        if g in visited:
            return
        visited.add(g)
        for called in g.called_graphs:
            visit(called)
        order[g] = None

    for graph in graphs:
        visit(graph)
    return list(order)
