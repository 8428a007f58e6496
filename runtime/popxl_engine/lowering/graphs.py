"""The block of a single graph: one instruction for each op, calls too.

Passes that must do the same to a graph wherever it is called work on it, with all its outputs
live, whatever a caller uses of them: so a forward graph runs the same kernels everywhere, and what
is computed again has the same bits.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from popxl.graph import Graph
from popxl.op_records import Op, map_tensors
from popxl.tensor import Constant, Tensor

from popxl_engine.ir import Block, Instr, Value

GraphPass = Callable[[Block], Block]


@dataclass(frozen=True)
class GraphBlock:
    """The block of a graph. ``values``: what its tensors have become."""

    block: Block
    values: Mapping[Tensor, Value]

    @cached_property
    def used(self) -> set[Value]:
        """What its instructions use, and what it returns."""
        return {v for instr in self.block.instrs for v in instr.inputs()}.union(self.block.outputs)


def short_name(graph: Graph) -> str:
    """A graph's name without the number that makes it unique."""
    return graph.name.split("_subgraph(")[0]


def op_of(instr: Instr) -> Op:
    """The op that an instruction of a graph's block is."""
    assert instr.source is not None, "each instruction of a graph is of an op"
    return instr.source


def graph_block(
    graph: Graph, run_passes: GraphPass, ops: Collection[Op] | None = None
) -> GraphBlock:
    """The block of a graph, after passes.

    Args:
        run_passes: what they make of a block.
        ops: those that run; default: all.
    """
    values: dict[Tensor, Value] = {}
    constants: dict[Constant, Value] = {}
    state: dict[Tensor, Value] = {}

    def value(t: Tensor) -> Value:
        if t not in values:
            values[t] = Value(t.name, t.spec)
            if isinstance(t, Constant):
                constants[t] = values[t]
            elif t not in defined:
                state[t] = values[t]
        return values[t]

    run = [op for op in graph.ops if ops is None or op in ops]
    defined = set(graph.inputs).union(*(op.outputs for op in run))
    taken = tuple(map(value, graph.inputs))
    for constant in graph.constants:
        value(constant)
    instrs: list[Instr] = []
    for op in run:
        arguments = {n: map_tensors(a, value) for n, a in op.arguments.items()}
        results = tuple(map(value, op.outputs))
        instrs.append(Instr("op", arguments, results, op.definition, op))
    outputs = tuple(map(value, graph.outputs))
    if graph.rounding_seed is not None:
        value(graph.rounding_seed)
    block = Block(
        graph.name,
        taken,
        frozenset(range(len(taken))),
        tuple(instrs),
        outputs,
        constants,
        state,
    )
    return GraphBlock(run_passes(block), values)
