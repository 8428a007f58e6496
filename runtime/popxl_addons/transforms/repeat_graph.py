"""Make a graph do what it does several times."""

import popxl
from popxl import ops
from popxl.transforms.clone import clone_ops, remove_ops

from popxl_addons.utils import suffix_graph_name


def repeat_graph(graph: popxl.Graph, repeat_count: int) -> popxl.Graph:
    """Changes the graph: its body runs ``repeat_count`` times. Variables persist between iterations, streams advance.

    Nothing happens for a count of one or less. Everything the body uses from outside is by reference. Tensors made in
    the body before belong to the repeat's graph from then on.

    Raises:
        ValueError: the graph has outputs.
    """
    if repeat_count <= 1:
        return graph
    if graph.outputs:
        raise ValueError(
            f"repeat_graph: got graph '{graph.name}' with {len(graph.outputs)} outputs; expected none. Use ops.repeat "
            "for a graph whose outputs feed its next iteration."
        )
    body_ops = graph.ops
    made_here = {t for op in body_ops for t in op.outputs} | set(graph.constants)
    used = dict.fromkeys(t for op in body_ops for t in op.inputs if t not in made_here)
    body = graph.ir.create_empty_graph(suffix_graph_name(graph.name or "main", "repeat"))
    with body:
        inputs = {t: popxl.graph_input(t.shape, t.dtype, t.name, True, t.meta_shape or None) for t in used}
        clone_ops(graph, inputs)
    remove_ops(graph, body_ops)
    with graph:
        ops.repeat(body, repeat_count, inputs_dict={inputs[t]: t for t in used})
    return graph
