"""Instructions whose results nobody reads."""

from typing import Any, List, Set

from popxl_engine.analysis.aliases import MustAlias
from popxl_engine.analysis.effects import effects_of_instr
from popxl_engine.ir import Block, Instr, map_blocks


def remove_dead_code(program: Block) -> Block:
    """Drop instructions whose results nobody reads and that have no lasting effect, and constants
    that none reads.
    """
    return map_blocks(program, _without_dead_code)


def _without_dead_code(block: Block) -> Block:
    storage = block.find(MustAlias).storage
    live: Set[Any] = {storage(v) for v in (*block.outputs, *block.state.values())}
    live |= {storage(block.inputs[i]) for i in block.by_ref}
    kept: List[Instr] = []
    for instr in reversed(block.instrs):
        touched = (*instr.outputs, *instr.written(), *instr.lent())
        if effects_of_instr(instr).lasts or any(storage(v) in live for v in touched):
            kept.append(instr)
            live.update(storage(v) for v in instr.inputs())
    read = {v for instr in kept for v in instr.inputs()}.union(block.outputs)
    constants = {c: v for c, v in block.constants.items() if v in read}
    if len(kept) == len(block.instrs) and len(constants) == len(block.constants):
        return block
    return block.with_instrs(reversed(kept), constants=constants)
