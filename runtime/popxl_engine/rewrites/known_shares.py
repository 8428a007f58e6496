"""Gradients of attention that know where probabilities come from: their mask, and what dropout let through."""

from typing import Optional

import numpy as np

from popxl_engine.blocks import Block, Instr, Value
from popxl_engine.rewrites.attention import ATTENTION, GRADIENT
from popxl_engine.rewrites.joined_gradients import ROWS
from popxl_engine.rewrites.uses import Uses


def known_shares(block: Block) -> None:
    """A gradient of an attention in the same block takes its mask, and draws nothing again."""
    gradients = [instr for instr in block.instrs if instr.definition in (GRADIENT, ROWS)]
    if not gradients:
        return
    uses = Uses(block)
    for instr in gradients:
        forward = _forward(uses, instr)
        if forward is None:
            continue
        if _source(uses, forward.arguments["mask"]) is not None:
            instr.arguments["mask"] = forward.arguments["mask"]
        if instr.arguments["seed_tensor"] is not None and _is_its_dropout(uses, instr, forward):
            instr.arguments["seed_tensor"] = None


def _source(uses: Uses, v: Value) -> Optional[Value]:
    """What a value is a copy of, if none of the copies is written, nor it."""
    chain = list(uses.copied_from(v))
    return None if any(map(uses.is_written, chain)) else chain[-1]


def _forward(uses: Uses, gradient: Instr) -> Optional[Instr]:
    """The attention whose probabilities a gradient is given."""
    probabilities = _source(uses, gradient.arguments["probabilities"])
    maker = uses.maker.get(probabilities) if probabilities is not None else None
    is_it = maker is not None and maker.definition is ATTENTION and maker.outputs[0] is probabilities
    return maker if is_it else None


def _is_its_dropout(uses: Uses, gradient: Instr, forward: Instr) -> bool:
    """Whether a gradient is given what dropout left of the probabilities, and would draw as that did."""
    of, a = forward.arguments, gradient.arguments
    if of["seed_tensor"] is None or of["p"] != a["p"] or np.float32(1 / (1 - of["p"])) == 1:
        return False  # a factor of 1 says that nothing is dropped
    seed = _source(uses, a["seed_tensor"])
    return (
        seed is not None
        and seed is _source(uses, of["seed_tensor"])
        and _source(uses, a["factors"]) is forward.outputs[1]
    )
