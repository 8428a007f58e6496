"""Which graphs become blocks of their own: those that would be inlined very often."""

from popxl.graph import Graph, called_first

MOST_INLINED = 256
"""Times that a graph is inlined in the main graph. The layers of a large model, written out, are
fewer.

Inlined, a graph's results are used where they are, what nobody reads is not computed, and rules see
forward and gradient side by side. What it costs is time to make a session, which nested calls would
make exponential.
"""
MOST_INLINED_BELOW = 32
"""Times that a graph is inlined in one that is not: as those are called often, what they call in
turn is mostly nested.
"""


def outlined_graphs(main: Graph) -> set[Graph]:
    """The graphs that are not inlined: a caller counts as often as it is inlined itself, or once if
    it is not.
    """
    times: dict[Graph, int] = {main: 1}
    below: set[Graph] = set()
    """Graphs that an outlined one calls, directly or not."""
    outlined: set[Graph] = set()
    for graph in reversed(called_first(main)):
        if times[graph] > (MOST_INLINED_BELOW if graph in below else MOST_INLINED):
            outlined.add(graph)
            times[graph] = 1
        if graph in outlined or graph in below:
            below.update(graph.called_graphs)
        for op in graph.ops:
            for called, _ in op.called():
                # A loop's first iteration may be inlined, for what it takes by reference, and the
                # others be its body.
                parts = (
                    2
                    if op.arguments.get("repeat_count", 0) > 1
                    and any(map(op.is_by_reference, called.inputs))
                    else 1
                )
                times[called] = times.get(called, 0) + times[graph] * parts
    return outlined
