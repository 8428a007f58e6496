"""A cross entropy and its gradient, which one op makes."""

from typing import Any

from popxl_engine.ir import Block, Instr, Value
from popxl_engine.ops.cross_entropy import cross_entropy_and_grad, softcap_logsumexp_and_pick
from popxl_engine.passes.rewriter import Rewriter, fused

LOSSES = ("logsumexp_and_pick", softcap_logsumexp_and_pick.name)


def fuse_cross_entropy(block: Block) -> Block:
    """A loss is made together with its gradient with respect to the logits, where its own gradient
    does not depend on it: a row is in the cache then, and each exponential is taken once.

    What reads the loss before the gradient is made reads it after that. Nothing may write in
    between, and these readers may do nothing but make their results.
    """
    rewriter = Rewriter(block)
    end = 0
    for first, loss in rewriter.ops(*LOSSES):
        last = _gradient_of(rewriter, loss)
        if last is None or first < end or rewriter.writes_between(first, last):
            continue
        gradient, readers = rewriter.instrs[last], _readers(rewriter, first, last)
        own = {name: gradient.arguments[name] for name in ("d_logsumexp", "d_picked")}
        late = {*loss.outputs, *(v for i in readers for v in rewriter.instrs[i].outputs)}
        if late & {*own.values()} or not all(_is_pure(rewriter.instrs[i]) for i in readers):
            continue
        arguments = {"cap": None, **loss.arguments, **own}
        outputs = (*loss.outputs, *gradient.outputs)
        both = fused(gradient, cross_entropy_and_grad, arguments, outputs)
        if rewriter.replace(last, both, first):
            rewriter.move_after(last, readers)
            end = last
    return rewriter.result()


def _gradient_of(rewriter: Rewriter, loss: Instr) -> int | None:
    """The position of the first gradient of a loss with respect to its logits."""
    assert loss.definition is not None
    wanted = {**loss.arguments, "logsumexp": loss.outputs[0]}

    def source(v: Any) -> Any:
        return rewriter.uses.source(v) if isinstance(v, Value) else v

    for i, gradient in rewriter.ops(f"{loss.definition.name}_grad"):
        pairs = [(source(gradient.arguments[name]), source(v)) for name, v in wanted.items()]
        if all(one is not None and one == other for one, other in pairs):
            return i
    return None


def _readers(rewriter: Rewriter, first: int, last: int) -> list[int]:
    """The positions between two instructions of what the first one's results are needed for."""
    made = {*rewriter.instrs[first].outputs}
    found: list[int] = []
    for i in range(first + 1, last):
        if made & {*rewriter.instrs[i].inputs()}:
            found.append(i)
            made |= {*rewriter.instrs[i].outputs}
    return found


def _is_pure(instr: Instr) -> bool:
    """Whether an instruction that writes nothing has no other effects either."""
    return not (instr.effects or instr.bodies)
