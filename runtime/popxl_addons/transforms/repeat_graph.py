"""Make a graph do what it does several times."""

from collections.abc import Iterable

import popxl
from popxl import ops
from popxl.opdef import Op
from popxl.transforms.outline import outline

from popxl_addons.utils import suffix_graph_name


def repeat_graph(graph: popxl.Graph, repeat_count: int) -> popxl.Graph:
    """Changes the graph: its body runs ``repeat_count`` times. Variables persist between
    iterations, streams advance.

    Nothing happens for a count of one or less. Everything the body uses from outside is by
    reference. Tensors made in the body before belong to the repeat's graph from then on. Ops that
    run while weights travel stay as they are.

    Raises:
        ValueError: the graph has outputs.
    """
    if repeat_count <= 1:
        return graph
    if graph.outputs:
        raise ValueError(
            f"repeat_graph: got graph '{graph.name}' with {len(graph.outputs)} outputs; expected "
            "none. Use ops.repeat for a graph whose outputs feed its next iteration."
        )
    repeat_ops(graph, [op for op in graph.ops if runs_with_the_program(op)], repeat_count, "repeat")
    return graph


def runs_with_the_program(op: Op) -> bool:
    """Whether an op is the program's own, and not one that runs while weights travel between host
    and device.
    """
    return op.execution is popxl.ExecutionContext.Normal


def repeat_ops(graph: popxl.Graph, body: Iterable[Op], repeat_count: int, suffix: str) -> None:
    """Changes the graph: a repeat of ``body``, in the order given, at its end in place of these
    ops.

    Args:
        suffix: of the repeat's graph's name.
    """
    repeated, inputs = outline(graph, body, suffix_graph_name(graph.name or "main", suffix))
    with graph:
        ops.repeat(repeated, repeat_count, inputs_dict=inputs)
