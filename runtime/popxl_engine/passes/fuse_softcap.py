"""Logits that are bounded before their cross entropy."""

from popxl_engine.ir import Block, Instr
from popxl_engine.ops.cross_entropy import (
    softcap_logsumexp_and_pick,
    softcap_logsumexp_and_pick_grad,
)
from popxl_engine.passes.rewriter import Match, Rewriter, fused, pattern

GRADIENT = pattern(
    "logsumexp_and_pick_grad",
    d_logsumexp="d_logsumexp",
    d_picked="d_picked",
    logsumexp="logsumexp",
    logits="logits",
    indices="indices",
)


def fuse_softcap(block: Block) -> Block:
    """log-sum-exp and its gradient bound the logits themselves: bounded logits and their gradient
    are stored nowhere, the same numbers in float32, and not rounded on the way in 16 bits.
    """
    rewriter = Rewriter(block)
    for _, softcap in rewriter.ops("softcap"):
        logits, cap = softcap.arguments["t"], softcap.arguments["cap"]
        readers = rewriter.uses.readers(softcap.outputs)
        if readers is None or rewriter.uses.is_written(logits):
            continue
        losses = [i for i in readers if i.is_op("logsumexp_and_pick")]
        slopes = {i: found for i in readers if (found := _gradient(rewriter, i, cap))}
        gradients = {rewriter.instrs[n] for found in slopes.values() for n in found.absorbed}
        if {*losses, *slopes, *gradients} != set(readers):
            continue  # others see bounded logits, or write them
        own = {"logits": logits, "cap": cap}
        for loss in losses:
            arguments = {**loss.arguments, **own}
            position = rewriter.uses.position[loss]
            rewriter.replace(position, fused(loss, softcap_logsumexp_and_pick, arguments))
        for slope, found in slopes.items():
            arguments = {**found.arguments, **own}
            both = fused(slope, softcap_logsumexp_and_pick_grad, arguments)
            rewriter.replace(rewriter.uses.position[slope], both, *found.absorbed)
    return rewriter.result()


def _gradient(rewriter: Rewriter, slope: Instr, cap: float) -> Match | None:
    """The gradient of log-sum-exp that that of a bound continues."""
    if not slope.is_op("softcap_grad") or slope.arguments["cap"] != cap:
        return None
    return rewriter.match(rewriter.uses.position[slope], dy=GRADIENT)
