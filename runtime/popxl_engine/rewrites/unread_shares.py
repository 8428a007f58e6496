"""Attention whose probabilities nobody reads gives its result alone, and keeps no memory for
them.
"""

from dataclasses import replace
from typing import Dict

import torch

from popxl_engine.blocks import Block, Instr
from popxl_engine.rewrites.attention import ATTENTION, Seed, attend
from popxl_engine.rewrites.match import fused
from popxl_engine.rewrites.uses import Uses


def attention_alone(
    query: torch.Tensor,
    key_t: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    seed_tensor: Seed,
    p: float,
) -> torch.Tensor:
    """The last result of `attention`, in the same bits."""
    (y,) = attend(query, key_t, value, mask, scale, seed_tensor, p, keeps_shares=False)
    return y


ALONE = fused(attention_alone)


def unread_shares(block: Block) -> None:
    """Where probabilities, and what dropout leaves of them, are at most copied, they are not
    written at all.
    """
    attentions = [instr for instr in block.instrs if instr.definition is ATTENTION]
    if not attentions:
        return
    uses = Uses(block)
    made: Dict[Instr, Instr] = {}
    for instr in attentions:
        *shares, y = instr.outputs
        if uses.readers(shares) == []:
            made[instr] = replace(instr, definition=ALONE, outputs=[y])
    block.instrs = [made.get(instr, instr) for instr in block.instrs]
