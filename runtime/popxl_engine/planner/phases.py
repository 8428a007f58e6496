"""Which instructions of a lowered program belong to which phase.

A phase is a graph that the main graph calls or repeats. A graph whose iterations are steps is none,
but what it calls: all that a main graph does, or a graph that calls several of the main graph's
phases again. Nor is one that `popxl.extensions.split_into_phases` names.
"""

from collections.abc import Iterator

from popxl.graph import Graph
from popxl.ir import Ir
from popxl.opdef import Op
from popxl.transforms.fragments import TO_HOST

from popxl_engine.ir import Block, Instr
from popxl_engine.lowering.graphs import short_name

MAIN = "main"
"""The phase of what the main graph does by itself."""


def _run_in(graph: Graph) -> list[Op]:
    """A graph's ops that runs come by: of the main graph all but those of downloads."""
    is_main = graph is graph.main_graph
    return [op for op in graph.ops if not (is_main and op.execution is TO_HOST)]


def loops_of_steps(main: Graph) -> set[Op]:
    """The repeats in a graph, and in what these repeat, whose iterations are steps."""
    return _around_phases(main)[0]


def _ops_around_phases(main: Graph) -> set[Op]:
    """The ops whose graphs are no phases, but call some."""
    return set[Op]().union(*_around_phases(main))


def _around_phases(main: Graph) -> tuple[set[Op], set[Op]]:
    """The repeats whose iterations are steps, and other ops whose graphs are no phases."""
    found: set[Op] = set()
    others: set[Op] = set()
    graphs = [main]
    for graph in graphs:  # it grows
        ops = _run_in(graph)
        called = {inner for op in ops for inner, _ in op.called()}
        for op in ops:
            split = [inner for inner, _ in op.called() if inner.is_split]
            if split:
                others.add(op)
                graphs += [inner for inner in split if inner not in graphs]
            if split or op.definition.name != "repeat":
                continue
            body: Graph = op.arguments["graph"]
            if len(ops) == 1 or len(called.intersection(body.called_graphs)) > 1:
                found.add(op)
                if body not in graphs:
                    graphs.append(body)
    return found, others


def steps_of_run(ir: Ir) -> int:
    """How many steps a run does: the main graph itself is one, where it does not only repeat
    one.
    """

    def steps(graph: Graph) -> int:
        ops = _run_in(graph)
        inner = [op for op in ops if op in loops]
        iterations = sum(
            op.arguments["repeat_count"] * steps(op.arguments["graph"]) for op in inner
        )
        return iterations + (len(ops) > len(inner) or not inner)

    loops = loops_of_steps(ir.main_graph)
    return steps(ir.main_graph)


def runs_of(ir: Ir) -> dict[str, int]:
    """How often a run goes through each phase, repeats included."""
    runs = {MAIN: steps_of_run(ir)}
    around = _ops_around_phases(ir.main_graph)
    for _, name, times in _called(ir.main_graph, around):
        runs[name] = runs.get(name, 0) + times
    return runs


def calls_of(ir: Ir, phase: str) -> list[tuple[Graph, int]]:
    """The calls of a phase in a run, in order: a graph of its name, and how often it runs."""
    around = _ops_around_phases(ir.main_graph)

    def of(graph: Graph) -> list[tuple[Graph, int]]:
        found = []
        for op in _run_in(graph):
            times = op.arguments.get("repeat_count", 1)
            for called, _ in op.called():
                if op in around:
                    found += of(called) * times
                elif short_name(called) == phase:
                    found.append((called, times))
        return found

    return of(ir.main_graph)


def in_phases(ir: Ir, block: Block) -> Iterator[tuple[str, Instr, int]]:
    """The instructions that phases are made of, in order: each with its phase, and how often a run
    comes by.

    Loops around phases are left out, what they repeat is not. Copies go with what is before them.
    """
    around = _ops_around_phases(ir.main_graph)
    names = {path: name for path, name, _ in _called(ir.main_graph, around)}
    phases = sorted(names.items(), key=lambda found: -len(found[0]))

    def of(block: Block, times: int) -> Iterator[tuple[str, Instr, int]]:
        phase = MAIN
        for instr in block.instrs:
            if instr.bodies and instr.source in around:
                iterations = instr.arguments.get("repeat_count", 1)
                yield from of(instr.bodies[0], times * iterations)
                phase = MAIN
                continue
            if instr.kind != "copy":
                path = instr.path
                if instr.bodies and instr.source is not None:
                    path += f"/{short_name(instr.source.called()[0][0])}"
                phase = next(
                    (name for inside, name in phases if f"{path}/".startswith(f"{inside}/")), MAIN
                )
            yield phase, instr, times

    return of(block, 1)


def entries(ir: Ir, block: Block) -> dict[int, str]:
    """The instructions before which a run comes to another phase, by ``id``: the phases."""
    phases = {id(instr): phase for phase, instr, _ in in_phases(ir, block)}
    found: dict[int, str] = {}

    def walk(block: Block) -> None:
        current = None
        for instr in block.instrs:
            phase = phases.get(id(instr))
            if phase is None:  # a loop of steps
                walk(instr.bodies[0])
            elif phase != current:
                found[id(instr)] = phase
            current = phase

    walk(block)
    return found


def _called(
    graph: Graph, around: set[Op], path: str = "", times: int = 1
) -> Iterator[tuple[str, str, int]]:
    """Each call of a phase: its path, through the steps around it, its name, and how often a run
    makes it.
    """
    for op in _run_in(graph):
        iterations = times * op.arguments.get("repeat_count", 1)
        for called, _ in op.called():
            inside = f"{path}/{short_name(called)}"
            if op in around:
                yield from _called(called, around, inside, iterations)
            else:
                yield inside, short_name(called), iterations
