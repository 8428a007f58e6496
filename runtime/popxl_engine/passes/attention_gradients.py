"""What passes over an attention and its gradients in one block have in common."""

from typing import Any

from popxl_engine.analysis.def_use import DefUse
from popxl_engine.analysis.value_numbers import ValueNumbers, permuted
from popxl_engine.ir import Block, Instr
from popxl_engine.ops.attention import attention, attention_grad, attention_grad_packed
from popxl_engine.passes.attention import SWAPPED

HIDING = ("mask", "positions", "causal", "window")
"""What hides keys from queries, in an attention and in its gradients."""


def gradients_of_probs(block: Block) -> list[Instr]:
    """Gradients of attention that are given probabilities."""
    found = [i for i in block.instrs if i.definition in (attention_grad, attention_grad_packed)]
    return [instr for instr in found if instr.arguments["probs"] is not None]


def forward_of(uses: DefUse, gradient: Instr) -> Instr | None:
    """The attention whose probabilities a gradient is given."""
    probabilities = uses.source(gradient.arguments["probs"])
    maker = uses.maker.get(probabilities) if probabilities is not None else None
    if maker is None or maker.definition is not attention:
        return None
    return maker if maker.outputs[0] is probabilities else None


def are_of_same(numbers: ValueNumbers, forward: Instr, gradient: Instr) -> bool:
    """Whether a gradient has an attention's queries, keys, values, scale and softcap."""
    of, a = forward.arguments, gradient.arguments
    pairs = ((of["query"], a["query_t"]), (of["key_t"], a["key"]), (of["value"], a["value_t"]))
    are_equal = all(numbers.of(one) == permuted(numbers.of(other), SWAPPED) for one, other in pairs)
    return are_equal and all(of[name] == a[name] for name in ("scale", "softcap"))


def hiding_of(uses: DefUse, forward: Instr) -> dict[str, Any] | None:
    """What hides keys in an attention, unless somebody writes to it."""
    found = {name: forward.arguments[name] for name in HIDING}
    tensors = (found["mask"], found["positions"])
    is_kept = all(t is None or uses.source(t) is not None for t in tensors)
    return found if is_kept else None
