"""The site of each probe of a program: its lane and its work, and the phase and the loops around
it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from popxl.ir import Ir
from popxl.profile import Work

from popxl_engine.analysis.effects import instrs_of, synchronizes
from popxl_engine.ir import Block, Instr, blocks_of
from popxl_engine.planner.costs import CostCounter
from popxl_engine.planner.phases import MAIN, loops_of_steps, runs_of, steps_of_run
from popxl_engine.profiler.costs import PhaseSegment, PlannedWork, as_work, phase_segments
from popxl_engine.profiler.probes import Kind, Probe

Frame = Block | PhaseSegment
"""What lasts longer than an instruction: an iteration of a loop, or a segment of a phase."""


@dataclass(frozen=True, eq=False)
class ProbeSite:
    """What is known of a probe before the program runs."""

    kind: Kind
    lane: str
    name: str
    phase: str
    work: Work
    frames: tuple[Frame, ...]
    """Frames around it, outermost first; none where `is_shared`."""
    is_shared: bool
    """Whether it is in a block that is called, maybe from several sites: it belongs to what its
    caller does.
    """
    positions: dict[Block, int]
    """How far each block around it but branches has come: twice the instruction's position, and one
    more where that instruction has ended.
    """
    starts: tuple[Block, ...]
    """Bodies of the loop or call that begins here."""
    graph: str
    op: str


class Sites:
    """The sites of a program's probes, and names and work of what is around them."""

    def __init__(self, ir: Ir, block: Block):
        self.planned, self._counter = PlannedWork(ir), CostCounter(block)
        self.runs, self.steps, self._loops = (
            runs_of(ir),
            steps_of_run(ir),
            loops_of_steps(ir.main_graph),
        )
        self._segments: dict[int, PhaseSegment] = {
            id(instr): s for s, instr, _ in phase_segments(ir, block)
        }
        self._around: dict[Block, tuple[Block, Instr]] = {}
        self._positions: dict[int, int] = {}
        self._index(block)

    def _index(self, main: Block) -> None:
        for block in blocks_of(main):
            for position, instr in enumerate(block.instrs):
                self._positions[id(instr)] = position
                for body in instr.bodies:
                    self._around[body] = block, instr
        runs = Counter(body for instr in instrs_of(main) for body in instr.bodies)
        several = {
            body
            for body, count in runs.items()
            if count > 1 or self._around[body][1].kind == "call"
        }
        self._shared = set(blocks_of(*several))
        """Blocks that are called, or that several instructions run, and what they run."""

    def of(self, probe: Probe) -> ProbeSite:
        """The site of a probe."""
        instr, is_shared = probe.instr, probe.block in self._shared
        frames: list[Frame] = []
        positions: dict[Block, int] = {}
        for block, around in () if is_shared else reversed(list(self._chain(probe))):
            kind = self._around[block][1].kind if block in self._around else None
            if kind == "repeat":
                frames.append(block)
            if kind != "conditional":
                has_ended = around is instr and probe.kind != "opened"
                positions[block] = 2 * self._positions[id(around)] + has_ended
            if id(around) in self._segments:
                frames.append(self._segments[id(around)])
        phases = [frame[0] for frame in frames if isinstance(frame, tuple)]
        return ProbeSite(
            kind=probe.kind,
            lane=lane_of(instr),
            name=_name(instr),
            phase=phases[0] if phases else MAIN,
            work=Work() if instr.bodies else as_work(self._counter.count([instr])),
            frames=tuple(frames),
            is_shared=is_shared,
            positions=positions,
            starts=instr.bodies if probe.kind == "opened" and not is_shared else (),
            graph=instr.path.strip("/"),
            op=instr.source.where if instr.source is not None else "",
        )

    def _chain(self, probe: Probe) -> Iterator[tuple[Block, Instr]]:
        """The blocks around a probe, each with its instruction that the probe is in, innermost
        first.
        """
        block, instr = probe.block, probe.instr
        yield block, instr
        while block in self._around:
            block, instr = self._around[block]
            yield block, instr

    def frame(self, frame: Frame, iteration: int) -> tuple[str, Work]:
        """Name and work of a segment, or of an iteration of a loop."""
        if isinstance(frame, tuple):
            return frame[0], self.planned.phase_segments.get(frame, Work())
        _, loop = self._around[frame]
        iterations = loop.arguments["repeat_count"]
        shown = f"{frame.name.rsplit('/', 1)[-1]} {iteration + 1} of {iterations}"
        if self._loops == {loop.source}:  # iterations of several loops of steps count by themselves
            shown = f"step {self.steps - iterations + iteration + 1} of {self.steps}"
        return shown, self.planned.loop(loop).share(iterations)


def lane_of(instr: Instr) -> str:
    """Which of `LANES` an instruction is in."""
    if "remote" in instr.effects:
        return (
            "load" if instr.definition is not None and "load" in instr.definition.name else "store"
        )
    if "host" in instr.effects:
        return "host I/O"
    return "collectives" if synchronizes(instr) else "compute"


def _name(instr: Instr) -> str:
    if instr.definition is None:
        return "copy"
    buffer = instr.arguments.get("remote_buffer")
    return (
        instr.definition.name
        if buffer is None
        else f"{instr.definition.name} {buffer.remote_buffer_id}"
    )
