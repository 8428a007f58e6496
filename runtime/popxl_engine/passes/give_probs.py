"""Gradients of attention take probabilities, where what they are of is computed in the same block
anyway.
"""

from popxl.tensor import TensorSpec

from popxl_engine.analysis.def_use import DefUse
from popxl_engine.analysis.value_numbers import ValueNumbers
from popxl_engine.ir import Block, Instr, Value
from popxl_engine.ops.attention import attention, attention_grad, attention_with_statistics
from popxl_engine.passes.attention import NO_STATISTICS
from popxl_engine.passes.attention_gradients import are_of_same
from popxl_engine.passes.reuse_dropout import LONGEST
from popxl_engine.passes.rewriter import fused


def give_probs(block: Block) -> Block:
    """An attention gives its probabilities instead of statistics to gradients beside it, if these
    alone read the statistics, and nobody has to make probabilities twice.

    Not those of a long text: there its gradient makes them again.
    """
    replaced: dict[Instr, Instr] = {}
    for forward in block.instrs:
        if forward.definition is attention_with_statistics and _is_short(forward):
            gradients = block.find(DefUse).readers(forward.outputs[:1])
            if gradients and all(_is_gradient(block, forward, each) for each in gradients):
                replaced.update(_with_probs(forward, gradients))
    return block.with_instrs(replaced.get(i, i) for i in block.instrs)


def _is_short(forward: Instr) -> bool:
    """Whether probabilities may be kept, and gradients have the bits of those that make them again.

    With dropout and an odd number of keys kernels work op by op unless what dropout left is given:
    then a gradient makes it again, whatever is kept.
    """
    queries, keys = forward.outputs[1].shape[2], forward.arguments["key_t"].shape[3]
    is_alike = forward.arguments["seed_tensor"] is None or keys % 2 == 0
    return queries * keys <= LONGEST and is_alike


def _is_gradient(block: Block, forward: Instr, gradient: Instr) -> bool:
    """Whether an instruction is a gradient that makes the probabilities that an attention has
    made.
    """
    if gradient.definition is not attention_grad:
        return False
    numbers = block.find(ValueNumbers)
    are_equal = _hiding(numbers, forward) == _hiding(numbers, gradient)
    return are_equal and are_of_same(numbers, forward, gradient)


def _hiding(numbers: ValueNumbers, instr: Instr) -> list[object]:
    """What an attention hides and drops."""
    a = instr.arguments
    tensors = (a["seed_tensor"], a["positions"])
    found = [None if t is None else numbers.of(t) for t in tensors]
    return [*found, a["p"], a["causal"], a["window"]]


def _with_probs(forward: Instr, gradients: list[Instr]) -> dict[Instr, Instr]:
    of, y = forward.arguments, forward.outputs[-1]
    spec = TensorSpec((*y.shape[:3], of["key_t"].shape[3]), y.dtype)
    names = ("probs",) if of["seed_tensor"] is None else ("probs", "dropped_probs")
    kept = tuple(Value(f"{name}_of_{y.name}", spec) for name in names)
    found = {forward: fused(forward, attention, {"mask": None, **of}, (*kept, y))}
    for gradient in gradients:
        arguments = {**gradient.arguments, **NO_STATISTICS}
        arguments |= {"probs": kept[0], "dropped_probs": kept[-1]}
        found[gradient] = fused(gradient, attention_grad, arguments)
    taken = {old: new for old, new in found.items() if new is not None}
    assert len(taken) == len(found), "attention takes what the same without probabilities does"
    return taken
