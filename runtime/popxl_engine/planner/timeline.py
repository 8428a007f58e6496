"""The order of what processors and links do in a phase, for plans of what runs beside what."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby

from popxl.ir import Ir
from popxl.op_records import op_cost
from popxl.plan import TimelineStep

from popxl_engine.analysis.effects import is_exchange
from popxl_engine.ir import Block, Instr
from popxl_engine.planner.costs import CostCounter
from popxl_engine.planner.phases import in_phases


def timelines(ir: Ir, block: Block, counter: CostCounter) -> dict[str, tuple[TimelineStep, ...]]:
    """The timeline of each phase of a program.

    Args:
        counter: has counted the whole program.
    """
    found: defaultdict[str, list[TimelineStep]] = defaultdict(list)
    writer = _Writer(counter)
    for (name, times), group in groupby(in_phases(ir, block), lambda each: (each[0], each[2])):
        found[name] += _repeated(times, writer.steps(instr for _, instr, _ in group))
    return {name: tuple(steps) for name, steps in found.items()}


def _repeated(times: int, steps: tuple[TimelineStep, ...]) -> tuple[TimelineStep, ...]:
    return steps if times == 1 or not steps else (TimelineStep(times=times, steps=steps),)


class _Writer:
    """Writes the steps of blocks, each once."""

    def __init__(self, counter: CostCounter):
        self._counter = counter
        self._bodies: dict[Block, tuple[TimelineStep, ...]] = {}

    def steps(self, instrs: Iterable[Instr]) -> tuple[TimelineStep, ...]:
        """What instructions do, with what is computed in a row as one."""
        found: list[TimelineStep] = []
        for step in (step for instr in instrs for step in self._steps(instr)):
            if found and step.is_compute and found[-1].is_compute:
                step = TimelineStep(flops=found.pop().flops + step.flops)
            found.append(step)
        return tuple(found)

    def _body(self, body: Block) -> tuple[TimelineStep, ...]:
        if body not in self._bodies:
            self._bodies[body] = self.steps(body.instrs)
        return self._bodies[body]

    def _steps(self, instr: Instr) -> Iterator[TimelineStep]:
        if instr.kind in ("call", "repeat"):
            times = instr.arguments.get("repeat_count", 1)
            yield from _repeated(times, self._body(instr.bodies[0]))
        elif instr.kind == "conditional":
            assert instr.source is not None
            is_first = self._counter.is_first_costlier[instr.source]
            yield from self._body(instr.bodies[0 if is_first else 1])
        elif instr.kind == "end":
            yield TimelineStep(ends=instr.arguments["begun"].name)
        elif instr.kind == "begin" or is_exchange(instr):
            assert instr.source is not None
            name = instr.outputs[0].name
            yield TimelineStep(begins=name, sent_bytes=op_cost(instr.source).bytes or 0)
            if instr.kind != "begin":
                yield TimelineStep(ends=name)
        elif flops := sum(self._counter.count([instr]).flops.values()):
            yield TimelineStep(flops=flops)
