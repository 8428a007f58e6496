"""Logits that a program widens for the cross entropy, which computes in float32 anyway."""

from popxl_engine.blocks import Block, Instr
from popxl_engine.rewrites.uses import Uses


def narrow_logits(block: Block) -> None:
    """log-sum-exp and its gradient read 16-bit logits themselves: the same numbers, without float32
    copies of them.

    A gradient whose only use is a cast back comes out of the kernel rounded.
    """
    found = [
        i
        for i in block.instrs
        if i.is_op("logsumexp_and_pick") or i.is_op("logsumexp_and_pick_grad")
    ]
    if not found:
        return
    uses = Uses(block)
    for instr in found:
        logits = uses.widened(instr.arguments["logits"])
        if logits is None:
            continue
        if instr.is_op("logsumexp_and_pick"):
            instr.arguments["logits"] = logits
        elif (chain := uses.only_cast(instr.outputs[0], logits.spec.dtype)) is not None:
            instr.arguments["logits"] = logits
            cast = uses.users[chain[-1]][0]
            for value in chain:
                value.spec = type(value.spec)(value.spec.shape, logits.spec.dtype)
            at = block.instrs.index(cast)
            block.instrs[at] = Instr(
                "copy", {"t": chain[-1]}, cast.outputs, source=cast.source, path=cast.path
            )
