"""Instructions whose results nobody reads."""

from typing import Any

from popxl.tensor import Constant

from popxl_engine.analysis.aliases import MustAlias
from popxl_engine.analysis.effects import effects_of_instr
from popxl_engine.ir import Block, Instr, Value, map_blocks


def remove_dead_code(program: Block) -> Block:
    """Drop instructions whose results nobody reads and that have no lasting effect, and constants
    that none reads.
    """
    return map_blocks(program, _without_dead_code)


def _without_dead_code(block: Block) -> Block:
    kept = block.find(_kept)
    if kept is None:
        return block
    instrs, constants = kept
    return block.with_instrs(instrs, constants=constants)


def _kept(block: Block) -> tuple[list[Instr], dict[Constant, Value]] | None:
    """The instructions and constants that are not dead; None where none is."""
    storage = block.find(MustAlias).storage
    live: set[Any] = {storage(v) for v in (*block.outputs, *block.state.values())}
    live |= {storage(block.inputs[i]) for i in block.by_ref}
    kept: list[Instr] = []
    for instr in reversed(block.instrs):
        touched = (*instr.outputs, *instr.may_write())
        if any(storage(v) in live for v in touched) or effects_of_instr(instr).has_side_effects:
            kept.append(instr)
            live.update(map(storage, instr.inputs()))
    read = {v for instr in kept for v in instr.inputs()}.union(block.outputs)
    constants = {c: v for c, v in block.constants.items() if v in read}
    if len(kept) == len(block.instrs) and len(constants) == len(block.constants):
        return None
    return kept[::-1], constants
