"""Attention whose probabilities nobody reads gives its result alone, and keeps no memory for
them.
"""

from dataclasses import replace
from typing import Dict

from popxl_engine.analysis.def_use import DefUse
from popxl_engine.ir import Block, Instr
from popxl_engine.rewrites.attention import ATTENTION
from popxl_engine.rewrites.unread_shares import ALONE as ATTENTION_NO_PROBS


def drop_unused_probs(block: Block) -> Block:
    """Where probabilities, and what dropout leaves of them, are at most copied, they are not
    written at all.
    """
    made: Dict[Instr, Instr] = {}
    for instr in block.instrs:
        if instr.definition is ATTENTION:
            *probs, y = instr.outputs
            if block.find(DefUse).readers(probs) == []:
                made[instr] = replace(instr, definition=ATTENTION_NO_PROBS, outputs=(y,))
    return block.with_instrs(made.get(i, i) for i in block.instrs)
