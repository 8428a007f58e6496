"""Gradients of attention that know where its probabilities, here shares, come from.

They take the mask, or what dropout let through, or compute the shares again.
"""

from typing import List, Optional, Set

import numpy as np

from popxl_engine.blocks import Block, Instr
from popxl_engine.ops.attention import attention, attention_grad, attention_grad_packed
from popxl_engine.ops.definition import check_results
from popxl_engine.rewrites.attention import SWAPPED
from popxl_engine.rewrites.uses import Uses, turned


def remade_shares(block: Block) -> None:
    """A gradient computes probabilities again, from mask and seed, where it alone reads what an
    attention gives.

    The attention goes, and with it the memory for all heads' probabilities.
    """
    gradients = _gradients(block)
    if not gradients:
        return
    uses = Uses(block)
    gone: Set[Instr] = set()
    for instr in gradients:
        forward = _forward(uses, instr)
        if forward is None or uses.source(forward.arguments["mask"]) is None:
            continue
        is_alone = uses.readers(forward.outputs) == [instr]
        if is_alone and are_of_same(uses, forward, instr) and _draws_the_same(uses, instr, forward):
            instr.arguments.update(probs=None, dropped_probs=None, mask=forward.arguments["mask"])
            assert instr.definition is not None
            check_results(instr.definition, instr.arguments, instr.outputs)
            gone.add(forward)
    block.instrs = [instr for instr in block.instrs if instr not in gone]


def known_shares(block: Block) -> None:
    """A gradient of an attention in the same block takes its mask, and draws nothing again."""
    gradients = _gradients(block)
    if not gradients:
        return
    uses = Uses(block)
    for instr in gradients:
        forward = _forward(uses, instr)
        if forward is None:
            continue
        mask, factors = forward.arguments["mask"], uses.source(instr.arguments["dropped_probs"])
        if uses.source(mask) is not None and factors in forward.outputs[:-1]:
            instr.arguments["mask"] = mask
        if instr.arguments["seed_tensor"] is not None and _is_its_dropout(uses, instr, forward):
            instr.arguments["seed_tensor"] = None


def are_of_same(uses: Uses, forward: Instr, gradient: Instr) -> bool:
    """Whether a gradient has an attention's queries, keys, values and scale."""
    of, a = forward.arguments, gradient.arguments
    pairs = ((of["query"], a["query_t"]), (of["key_t"], a["key"]), (of["value"], a["value_t"]))
    are_equal = all(
        uses.content(one) == turned(uses.content(other), SWAPPED) for one, other in pairs
    )
    return are_equal and of["scale"] == a["scale"]


def _gradients(block: Block) -> List[Instr]:
    """Those that are given probabilities."""
    found = [
        instr
        for instr in block.instrs
        if instr.definition in (attention_grad, attention_grad_packed)
    ]
    return [instr for instr in found if instr.arguments["probs"] is not None]


def _forward(uses: Uses, gradient: Instr) -> Optional[Instr]:
    """The attention whose probabilities a gradient is given."""
    probabilities = uses.source(gradient.arguments["probs"])
    maker = uses.maker.get(probabilities) if probabilities is not None else None
    is_it = (
        maker is not None and maker.definition is attention and maker.outputs[0] is probabilities
    )
    return maker if is_it else None


def _draws_the_same(uses: Uses, gradient: Instr, forward: Instr) -> bool:
    """Whether a gradient's factors are what its attention has multiplied with values, and can be
    made as that did.
    """
    of, a = forward.arguments, gradient.arguments
    if of["seed_tensor"] is None:
        return (
            a["seed_tensor"] is None
            and a["p"] == 0
            and uses.source(a["dropped_probs"]) is forward.outputs[0]
        )
    return a["seed_tensor"] is not None and _is_its_dropout(uses, gradient, forward)


def _is_its_dropout(uses: Uses, gradient: Instr, forward: Instr) -> bool:
    """Whether a gradient is given what dropout left of the probabilities, and would draw as that
    did.
    """
    of, a = forward.arguments, gradient.arguments
    if of["seed_tensor"] is None or of["p"] != a["p"] or np.float32(1 / (1 - of["p"])) == 1:
        return False  # a factor of 1 says that nothing is dropped
    seed = uses.source(a["seed_tensor"])
    return (
        seed is not None
        and seed is uses.source(of["seed_tensor"])
        and uses.source(a["dropped_probs"]) is forward.outputs[1]
    )
