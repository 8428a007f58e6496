"""Single graphs as the interpreter runs them."""

from collections.abc import Sequence
from typing import Any

import torch
from popxl.graph import Graph
from popxl_engine.interpreter import Cell, Interpreter
from popxl_engine.machine.lockstep import run_lockstep


def run_graph(
    graph: Graph, inputs: Sequence[torch.Tensor], replica: Any = None
) -> list[torch.Tensor]:
    """Run one graph on one replica. By-reference inputs are changed in place, as the caller would
    see it.
    """
    cells = [Cell.new(t) for t in inputs]
    outputs = run_lockstep({0: Interpreter(replica).graph(graph, cells)})[0]
    for tensor, t, cell in zip(inputs, graph.inputs, cells):
        if t in graph._by_ref_inputs:
            tensor.copy_(cell.read())
    return [c.read() for c in outputs]
