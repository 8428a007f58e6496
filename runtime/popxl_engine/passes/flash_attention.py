"""Causal attention without dropout as one kernel that keeps no probabilities."""

import logging
from functools import cache

from popxl import dtypes
from popxl.op_records import Op
from popxl.tensor import TensorSpec

from popxl_engine.analysis.def_use import DefUse
from popxl_engine.analysis.value_numbers import ValueNumbers
from popxl_engine.ir import Block, Instr, Value, blocks_of, map_blocks
from popxl_engine.ops import attention as ops
from popxl_engine.passes.attention_gradients import are_of_same
from popxl_engine.passes.rewriter import fused

logger = logging.getLogger("popxl")


def flash_attention(program: Block) -> Block:
    """Causal attention without dropout, window, documents or softcap, on a GPU, gives its result
    and log-sum-exp instead of probabilities.

    An op is rewritten wherever a program runs it or nowhere, so that what is computed again has the
    same bits.
    """
    gradients_of: dict[Instr, list[Instr]] = {}
    refused: set[Op | None] = set()
    for block in blocks_of(program):
        for instr in block.instrs:
            if instr.definition is ops.attention:
                found = _seen_by_gradients(block, instr) if _is_plain(instr) else None
                if found is not None:
                    gradients_of[instr] = found
                else:
                    refused.add(instr.source)
    replaced: dict[Instr, Instr] = {}
    for forward, gradients in gradients_of.items():
        if forward.source not in refused:
            replaced.update(_replaced(forward, gradients))
    return map_blocks(program, lambda b: b.with_instrs(replaced.get(i, i) for i in b.instrs))


def _is_plain(instr: Instr) -> bool:
    """Whether the kernels take it: as many keys as queries, each of which sees those up to its own,
    and whole heads.
    """
    a = instr.arguments
    query = a["query"]
    heads_fit = (
        query.shape[3] * query.dtype.itemsize % ops.ALIGNMENT == 0
        and query.dtype is not dtypes.float64
    )
    refused = [name for name in ("window", "positions", "softcap") if a[name]]
    if refused:
        _say_what_is_plain(" and ".join(refused))
    is_taken = a["causal"] and a["seed_tensor"] is None and not refused
    return is_taken and heads_fit and query.shape == a["value"].shape


@cache
def _say_what_is_plain(names: str) -> None:
    """Log once what no kernel here takes."""
    logger.warning(
        f"attention with {names} takes products and a softmax on this device, some queries at a "
        "time: no kernel of PyTorch's that keeps no probabilities has that here"
    )


def _seen_by_gradients(block: Block, instr: Instr) -> list[Instr] | None:
    """Its gradients, if nothing else sees the probabilities, and they are for the very same
    operands.
    """
    probabilities, y = instr.outputs
    uses = block.find(DefUse)
    gradients = uses.readers([probabilities])
    if gradients is None or gradients and uses.is_written(y):
        return None
    are_fit = all(
        g.definition is ops.attention_grad and _is_gradient(block, instr, g) for g in gradients
    )
    return gradients if are_fit else None


def _is_gradient(block: Block, forward: Instr, gradient: Instr) -> bool:
    """Whether a gradient is that of an attention, whose probabilities it is given, nobody having
    written to them.
    """
    a, uses = gradient.arguments, block.find(DefUse)
    are_given = all(
        uses.source(a[name]) is forward.outputs[0] for name in ("probs", "dropped_probs")
    )
    is_same = are_of_same(block.find(ValueNumbers), forward, gradient)
    return are_given and a["seed_tensor"] is None and is_same


def _replaced(forward: Instr, gradients: list[Instr]) -> dict[Instr, Instr]:
    of, (probs, y) = forward.arguments, forward.outputs
    logsumexp = Value(f"logsumexp_of_{probs.name}", TensorSpec(y.shape[:3], dtypes.float32))
    operands = {n: of[n] for n in ("query", "key_t", "value", "scale")}
    replaced = {forward: fused(forward, ops.flash_attention, operands, (y, logsumexp))}
    for gradient in gradients:
        operands = {n: gradient.arguments[n] for n in ("dy", "query_t", "key", "value_t")}
        operands |= {"y": y, "logsumexp": logsumexp, "scale": of["scale"]}
        replaced[gradient] = fused(gradient, ops.flash_attention_grad, operands)
    instrs = {old: new for old, new in replaced.items() if new is not None}
    assert len(instrs) == len(replaced), "_is_plain has asked for what the kernels take"
    return instrs
