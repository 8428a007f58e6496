"""Which graphs become blocks of their own: those that would be inlined very often. One block serves
all calls that use it alike.
"""

from collections.abc import Collection, Sequence
from typing import Any

from popxl.graph import Graph, called_first

from popxl_engine.ir import Instr, Value, filled
from popxl_engine.lowering.block_builder import BlockBuilder, Capture

Specialization = tuple[Any, ...]
"""What the block of an outlined graph is made for, beside the graph: hashable. Calls of one
specialization share a block.
"""

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


def specialization(
    captured: Sequence[Capture],
    references: Collection[Value],
    views: Sequence[Instr],
    outer: BlockBuilder,
) -> Specialization:
    """What a block must know of the values that it takes, beyond their shapes and types.

    Args:
        references: those that it takes by reference.
        views: how it makes again those that are views of what it takes.
        outer: the block around it.
    """
    given = tuple(
        (
            t.value.host and t.root not in outer.program.device_roots,
            t.value.sharding,
            outer.forms.get(t.value) if t.by_ref else None,
        )
        for t in captured
    )
    return (*given, *_made(references, captured, views))


def _made(
    references: Collection[Value], captured: Sequence[Capture], views: Sequence[Instr]
) -> tuple[Any, ...]:
    """Which by-reference inputs are the same value, and how those are made that are views of what
    is captured.
    """
    if not references:
        return ()
    order: dict[Value, int] = {}
    for t in captured:
        if t.by_ref:
            order.setdefault(t.value, len(order))
    steps = []
    for view in views:
        result = view.outputs[0]
        arguments = tuple(
            (n, filled(a, lambda v: order.get(v, v))) for n, a in view.arguments.items()
        )
        steps.append((view.definition, view.host, result.spec, result.sharding, arguments))
        order[result] = len(order)
    added = tuple(t.spec for t in captured if t.value not in references) if views else ()
    return tuple(order[v] for v in references), tuple(steps), added
