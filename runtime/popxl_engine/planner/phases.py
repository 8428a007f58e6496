"""Which instructions of a lowered program belong to which phase."""

from typing import Dict, Iterator, List, Tuple

from popxl.graph import Graph
from popxl.ir import Ir

from popxl_engine.blocks import Block, Instr

MAIN = "main"
"""The phase of what the main graph does by itself."""


def step_of(ir: Ir, block: Block) -> Tuple[Graph, Block, int]:
    """The graph that calls the phases, its block, and how often a run repeats it.

    A main graph that does nothing but repeat one graph is that graph, several times.
    """
    graph, times = ir.main_graph, 1
    while len(graph.ops) == 1 and graph.ops[0].definition.name == "repeat":
        repeats = [instr for instr in block.instrs if instr.kind == "repeat"]
        if len(repeats) != 1:
            break
        graph, block = graph.ops[0].arguments["graph"], repeats[0].bodies[0]
        times *= repeats[0].arguments["repeat_count"]
    return graph, block, times


def phase_names(graph: Graph) -> List[str]:
    """Names of the graphs that a graph calls."""
    return [short_name(called) for called in graph.called_graphs]


def short_name(graph: Graph) -> str:
    """A graph's name without the number that makes it unique."""
    return graph.name.split("_subgraph(")[0]


def runs_of(graph: Graph) -> Dict[str, int]:
    """How often a graph calls each phase, repeats included."""
    runs: Dict[str, int] = {}
    for op in graph.ops:
        for called, _ in op.called():
            name = short_name(called)
            runs[name] = runs.get(name, 0) + op.arguments.get("repeat_count", 1)
    return runs


def in_phases(graph: Graph, block: Block) -> Iterator[Tuple[str, Instr]]:
    """The instructions of the block that calls the phases, each with its phase; copies go with what is before them."""
    names = sorted(phase_names(graph), key=len, reverse=True)
    prefix = block.name if block.name != MAIN else ""
    phase = MAIN
    for instr in block.instrs:
        if instr.kind != "copy":
            path = instr.bodies[0].name if instr.bodies and instr.path == prefix else instr.path
            inside = path.removeprefix(prefix).lstrip("/")
            phase = next((n for n in names if inside == n or inside.startswith(f"{n}/")), MAIN)
        yield phase, instr
