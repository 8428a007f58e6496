"""The work of a program's phases and loops as the planner counts it, and that of single
instructions after fusion.
"""

from collections import defaultdict
from collections.abc import Iterator

from popxl.ir import Ir
from popxl.op_records import Op
from popxl.profile import Work

from popxl_engine.analysis.effects import instrs_of
from popxl_engine.compiler import compile_unfused
from popxl_engine.ir import Block, Instr
from popxl_engine.planner.costs import CostCounter, Costs
from popxl_engine.planner.phases import in_phases

PhaseSegment = tuple[str, int]
"""A phase, and which of its segments in the program: a phase that is called again later has
several.
"""


def as_work(costs: Costs) -> Work:
    """The sums of the planner, per replica."""
    sent = sum(sent for _, _, sent in costs.collectives.values())
    return Work(
        sum(costs.flops.values()), costs.loaded_bytes, costs.stored_bytes, costs.host_bytes, sent
    )


def phase_segments(ir: Ir, block: Block) -> Iterator[tuple[PhaseSegment, Instr, int]]:
    """The instructions of all phases, each with its phase's segment, and how often a run comes
    by.
    """
    count: dict[str, int] = {}
    before = None
    for phase, instr, times in in_phases(ir, block):
        if (phase, times) != before:
            count[phase] = count.get(phase, -1) + 1
        before = phase, times
        yield (phase, count[phase]), instr, times


class PlannedWork:
    """Work of the program before any fusion, as in plans: of phases in a run, and of loops with all
    their iterations.
    """

    def __init__(self, ir: Ir):
        block = compile_unfused(ir).block
        self._counter = CostCounter(block)
        costs: defaultdict[PhaseSegment, Costs] = defaultdict(Costs)
        self._times: dict[PhaseSegment, int] = {}
        for segment, instr, times in phase_segments(ir, block):
            costs[segment].add(self._counter.count([instr]))
            self._times[segment] = times
        self.phase_segments = {segment: as_work(cost) for segment, cost in costs.items()}
        loops = (instr for instr in instrs_of(block) if instr.kind == "repeat")
        self._loops = {loop_key(instr): as_work(self._counter.count([instr])) for instr in loops}

    def loop(self, instr: Instr) -> Work:
        """The work of a repeat in a program that may be fused."""
        return self._loops.get(loop_key(instr), Work())

    def phases(self) -> "dict[str, Work]":
        """The work of each phase in a run."""
        found: dict[str, Work] = {}
        for segment, work in self.phase_segments.items():
            name, _ = segment
            found[name] = Work.sum([found.get(name, Work()), work.times(self._times[segment])])
        return found


def loop_key(instr: Instr) -> tuple[str, Op]:
    """What tells a repeat from all others of its program, however it is lowered."""
    assert instr.source is not None
    return instr.bodies[0].name, instr.source
