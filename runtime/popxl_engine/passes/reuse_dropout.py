"""Gradients of attention take what hides keys and what dropout has left from the attention itself,
or compute its probabilities again.
"""

from dataclasses import replace

import numpy as np

from popxl_engine.analysis.def_use import DefUse
from popxl_engine.analysis.value_numbers import ValueNumbers
from popxl_engine.ir import Block, Instr
from popxl_engine.passes.attention_gradients import (
    are_of_same,
    forward_of,
    gradients_of_probs,
    hiding_of,
)

LONGEST = 2**22
"""Probabilities of a head that are at most kept where the attention's result is read, too."""


def recompute_probs(block: Block) -> Block:
    """A gradient computes probabilities again, from what hides keys and the seed, where it alone
    reads what an attention gives.

    The attention goes, and with it the memory for all heads' probabilities. That of a long text
    stays where its result is read: without probabilities.
    """
    gradients = gradients_of_probs(block)
    if not gradients:
        return block
    uses, numbers = block.find(DefUse), block.find(ValueNumbers)
    replaced: dict[Instr, Instr] = {}
    for instr in gradients:
        forward = forward_of(uses, instr)
        if forward is None:
            continue
        hiding = hiding_of(uses, forward)
        if hiding is None or not _reads_alone(uses, forward, instr):
            continue
        if are_of_same(numbers, forward, instr) and _draws_same(uses, instr, forward):
            again = {"probs": None, "dropped_probs": None, **hiding}
            replaced[instr] = replace(instr, arguments={**instr.arguments, **again})
    return block.with_instrs(replaced.get(i, i) for i in block.instrs)


def reuse_dropout(block: Block) -> Block:
    """A gradient of an attention in the same block takes what hides keys there, and draws nothing
    again.
    """
    gradients = gradients_of_probs(block)
    if not gradients:
        return block
    uses = block.find(DefUse)
    replaced: dict[Instr, Instr] = {}
    for instr in gradients:
        forward = forward_of(uses, instr)
        if forward is None:
            continue
        arguments = dict(instr.arguments)
        hiding, factors = hiding_of(uses, forward), uses.source(arguments["dropped_probs"])
        if hiding is not None and factors in forward.outputs[:-1]:
            arguments |= hiding
        if arguments["seed_tensor"] is not None and _is_its_dropout(uses, instr, forward):
            arguments["seed_tensor"] = None
        if arguments != instr.arguments:
            replaced[instr] = replace(instr, arguments=arguments)
    return block.with_instrs(replaced.get(i, i) for i in block.instrs)


def _reads_alone(uses: DefUse, forward: Instr, gradient: Instr) -> bool:
    """Whether a gradient alone reads what an attention gives; of a long one, the probabilities."""
    probs, outputs = forward.outputs[0], forward.outputs
    is_long = probs.shape[2] * probs.shape[3] > LONGEST
    return uses.readers(outputs[:-1] if is_long else outputs) == [gradient]


def _draws_same(uses: DefUse, gradient: Instr, forward: Instr) -> bool:
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


def _is_its_dropout(uses: DefUse, gradient: Instr, forward: Instr) -> bool:
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
