"""A graph's ops as the engine runs them: after fusion, before lowering.

Fusion sees one graph at a time with all its outputs live, whatever a caller uses of them, so that a
forward graph runs the same kernels wherever it is called and recomputation is bitwise.
"""

from dataclasses import dataclass
from typing import Any, Dict, List, Tuple

from popxl.graph import Graph
from popxl.opdef import Op, OpDefinition
from popxl.values import Tensor


@dataclass(eq=False)
class Step:
    """One op or fused op. ``arguments`` hold tensors of the graph; ``source`` is the user's op for
    messages.
    """

    definition: OpDefinition
    arguments: Dict[str, Any]
    outputs: Tuple[Tensor, ...]
    source: Op
    writers: Tuple[Op, ...] = ()
    """Of a fused op that writes several operands: the user's op that wrote each, in the order of
    its ``writes``.
    """


def steps_of(graph: Graph) -> List[Step]:
    """The steps of a graph, one per op."""
    return [Step(op.definition, op.arguments, op.outputs, op) for op in graph.ops]
