"""Logits that a program casts to float32 for the cross entropy, which computes so anyway."""

from dataclasses import replace

from popxl.tensor import TensorSpec

from popxl_engine.analysis.def_use import DefUse
from popxl_engine.ir import Block, Instr, Value

LOSSES = ("logsumexp_and_pick", "fused_softcap_logsumexp_and_pick")
GRADIENTS = ("logsumexp_and_pick_grad", "fused_softcap_logsumexp_and_pick_grad")


def narrow_logits(block: Block) -> Block:
    """log-sum-exp and its gradient read 16-bit logits themselves: the same numbers, without float32
    copies of them.

    A gradient whose only use is a cast back comes out of the kernel rounded.
    """
    replaced: dict[Instr, Instr] = {}
    for instr in block.instrs:
        is_gradient = any(map(instr.is_op, GRADIENTS))
        if not is_gradient and not any(map(instr.is_op, LOSSES)):
            continue
        uses = block.find(DefUse)
        logits = uses.upcast_source(instr.arguments["logits"])
        chain = (
            uses.only_cast(instr.outputs[0], logits.dtype)
            if logits is not None and is_gradient
            else None
        )
        if logits is None or is_gradient and chain is None:
            continue
        narrow = {**instr.arguments, "logits": logits}
        replaced[instr] = replace(instr, arguments=narrow)
        if chain is not None:
            cast = uses.users[chain[-1]][0]
            result = _narrowed(instr.outputs[0], logits)
            replaced[instr] = replace(replaced[instr], outputs=(result,))
            for value in chain[1:]:  # copies on the way to the cast
                copy = uses.maker[value]
                narrower = _narrowed(value, logits)
                replaced[copy] = replace(copy, arguments={"t": result}, outputs=(narrower,))
                result = narrower
            replaced[cast] = replace(cast, kind="copy", arguments={"t": result}, definition=None)
    return block.with_instrs(replaced.get(i, i) for i in block.instrs)


def _narrowed(value: Value, like: Value) -> Value:
    return replace(value, spec=TensorSpec(value.shape, like.dtype))
