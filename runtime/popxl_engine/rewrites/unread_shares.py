"""Attention whose probabilities nobody reads gives its result alone, and keeps no memory for them."""

from dataclasses import replace
from typing import Dict, List, Optional, Sequence, Set

import torch

from popxl_engine.blocks import Block, Instr, Value
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
    """Where probabilities, and what dropout leaves of them, are at most copied, they are not written at all."""
    attentions = [instr for instr in block.instrs if instr.definition is ATTENTION]
    if not attentions:
        return
    uses = Uses(block)
    made: Dict[Instr, Instr] = {}
    unread: Set[Instr] = set()
    for instr in attentions:
        *shares, y = instr.outputs
        copies = _copies(uses, shares)
        if copies is not None:
            made[instr] = replace(instr, definition=ALONE, outputs=[y])
            unread.update(copies)
    block.instrs = [made.get(i, i) for i in block.instrs if i not in unread]


def _copies(uses: Uses, values: Sequence[Value]) -> Optional[List[Instr]]:
    """What copies values, or copies of them, if nothing else sees any."""
    found: List[Instr] = []
    seen = list(values)
    for v in seen:  # it grows
        users = uses.users.get(v, [])
        if v in uses.kept or any(user.kind != "copy" for user in users):
            return None
        found += users
        seen += [copied for user in users for copied in user.outputs]
    return found
