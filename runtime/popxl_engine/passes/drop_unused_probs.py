"""Attention whose probabilities nobody reads gives its result alone, and keeps no memory for
them.
"""

from popxl_engine.analysis.def_use import DefUse
from popxl_engine.ir import Block, Instr
from popxl_engine.ops.attention import attention, attention_no_probs
from popxl_engine.passes.rewriter import fused


def drop_unused_probs(block: Block) -> Block:
    """Write no probabilities, nor what dropout leaves of them, where they are at most copied."""
    replaced: dict[Instr, Instr] = {}
    for instr in block.instrs:
        if instr.definition is attention:
            *probs, y = instr.outputs
            alone = fused(instr, attention_no_probs, outputs=(y,))
            if alone is not None and block.find(DefUse).readers(probs) == []:
                replaced[instr] = alone
    return block.with_instrs(replaced.get(i, i) for i in block.instrs)
