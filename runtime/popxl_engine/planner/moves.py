"""What a lowered program moves, in the order in which it says it."""

from collections.abc import Iterator

from popxl.ir import Ir
from popxl.opdef import op_cost
from popxl.plan import Move

from popxl_engine.compiler import compile_unfused
from popxl_engine.ir import Instr
from popxl_engine.kernels.collectives import READS
from popxl_engine.planner.phases import in_phases


def moves(ir: Ir) -> Iterator[Move]:
    """See `popxl.planning.moves`."""
    for phase, instr, times in in_phases(ir, compile_unfused(ir).block):
        yield from _of(instr, phase, times)


def _of(instr: Instr, phase: str, times: int) -> Iterator[Move]:
    """The moves of an instruction and of what it runs."""
    times *= instr.arguments.get("repeat_count", 1) if instr.kind == "repeat" else 1
    for body in instr.bodies:
        for inner in body.instrs:
            yield from _of(inner, phase, times)
    op, definition = instr.source, instr.definition
    if instr.kind != "op" or op is None or definition is None:
        return
    if instr.effects & {"host", "remote"}:
        nbytes = op_cost(op).bytes
        assert nbytes is not None
        yield Move(phase, definition.name, times, nbytes, instr.arguments.get("remote_buffer"))
    elif "collective" in instr.effects and READS.get(definition.name) != "own":
        yield Move(phase, definition.name, times, sum(t.spec.nbytes for t in op.inputs))
