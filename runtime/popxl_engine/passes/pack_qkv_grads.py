"""Gradients of attention's queries, keys and values, written side by side, where one product takes
all three.
"""

from typing import Any

from popxl_engine.analysis.def_use import DefUse
from popxl_engine.ir import Block, Instr, Value
from popxl_engine.ops.attention import attention_grad, attention_grad_packed
from popxl_engine.passes.attention import SWAPPED
from popxl_engine.passes.rewriter import fused

HEADS_THIRD = (0, 2, 1, 3)
KEY = 1
"""Which of the three gradients is that of a transpose."""


def pack_qkv_grads(block: Block) -> Block:
    """concat of the rows of the three gradients of an attention, which nobody else uses."""
    if not any(instr.definition is attention_grad for instr in block.instrs):
        return block
    uses = block.find(DefUse)
    replaced: dict[Instr, Instr] = {}
    packed: set[Instr] = set()
    for instr in block.instrs:
        if not instr.is_op("concat") or instr.arguments["axis"] != 1:
            continue
        whole = [_whole(uses, v, n == KEY) for n, v in enumerate(instr.arguments["ts"])]
        gradient = uses.maker.get(whole[0]) if whole[0] is not None else None
        if gradient is None or gradient.definition is not attention_grad:
            continue
        if list(gradient.outputs) != whole:
            continue
        together = fused(gradient, attention_grad_packed, outputs=instr.outputs)
        if together is not None:
            replaced[gradient] = together
            packed.add(instr)
    gone = packed | {view for instr in packed for view in _views(uses, instr)}
    return block.with_instrs(replaced.get(i, i) for i in block.instrs if i not in gone)


def _views(uses: DefUse, concat: Instr) -> list[Instr]:
    """What lies between three gradients and their concatenation."""
    found: list[Instr] = []
    values = list(concat.arguments["ts"])
    for v in values:  # it grows
        maker = uses.maker[v]
        if maker.definition is not attention_grad:
            found.append(maker)
            values.append(maker.arguments["t"])
    return found


def _whole(uses: DefUse, v: Value, is_permuted: bool) -> Value | None:
    """The [b, h, n, d], permuted the [b, h, d, n], of which a [b * n, h * d] is a view, if nobody
    uses anything in between.
    """
    views: list[tuple[str, Any]] = [
        ("reshape", None),
        ("transpose", HEADS_THIRD),
        ("transpose", SWAPPED),
    ]
    for name, permutation in views[: 2 + is_permuted]:
        v = _original(uses, v)
        maker = uses.maker.get(v)
        if (
            maker is None
            or not maker.is_op(name)
            or maker.arguments.get("permutation") != permutation
        ):
            return None
        source: Value = maker.arguments["t"]
        if name == "reshape" and not _joins_heads(source, v):
            return None
        if not uses.is_used_once(v):
            return None
        v = source
    v = _original(uses, v)
    return v if uses.is_used_once(v) else None


def _joins_heads(whole: Value, flat: Value) -> bool:
    """Whether a reshape makes rows of all heads of each position."""
    return (flat.rank, whole.rank) == (2, 4) and flat.shape[0] == whole.shape[0] * whole.shape[1]


def _original(uses: DefUse, v: Value) -> Value:
    """What a value is a copy of, if nobody else uses that."""
    while uses.is_used_once(v) and v in uses.maker and uses.maker[v].kind == "copy":
        v = uses.maker[v].arguments["t"]
    return v
