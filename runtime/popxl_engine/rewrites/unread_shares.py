"""Attention whose probabilities nobody reads gives its result alone, and keeps no memory for
them.
"""

from typing import Dict

from popxl_engine.blocks import Block, Instr
from popxl_engine.ops.attention import attention, attention_no_probs
from popxl_engine.rewrites.match import fused_instr
from popxl_engine.rewrites.uses import Uses


def unread_shares(block: Block) -> None:
    """Where probabilities, and what dropout leaves of them, are at most copied, they are not
    written at all.
    """
    attentions = [instr for instr in block.instrs if instr.definition is attention]
    if not attentions:
        return
    uses = Uses(block)
    made: Dict[Instr, Instr] = {}
    for instr in attentions:
        *shares, y = instr.outputs
        if uses.readers(shares) == []:
            made[instr] = fused_instr(instr, attention_no_probs, outputs=[y])
    block.instrs = [made.get(instr, instr) for instr in block.instrs]
