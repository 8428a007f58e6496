"""Gradients of attention's queries, keys and values, written side by side, where one product takes
all three.
"""

from typing import Any, Dict, List, Optional, Set, Tuple

from popxl_engine.blocks import Block, Instr, Value
from popxl_engine.ops.attention import attention_grad, attention_grad_packed
from popxl_engine.rewrites.attention import SWAPPED
from popxl_engine.rewrites.match import fused_instr
from popxl_engine.rewrites.uses import Uses

HEADS_THIRD = (0, 2, 1, 3)
KEY = 1
"""Which of the three gradients is that of a transpose."""


def join_gradients(block: Block) -> None:
    """concat of the rows of the three gradients of an attention, which nobody else uses."""
    if not any(instr.definition is attention_grad for instr in block.instrs):
        return
    uses = Uses(block)
    made: Dict[Instr, Instr] = {}
    joined: Set[Instr] = set()
    for instr in block.instrs:
        if (
            not instr.is_op("concat")
            or instr.arguments["axis"] != 1
            or len(instr.arguments["ts"]) != 3
        ):
            continue
        whole = [_shown(uses, v, n == KEY) for n, v in enumerate(instr.arguments["ts"])]
        gradient = uses.maker.get(whole[0]) if whole[0] is not None else None
        if (
            gradient is not None
            and gradient.definition is attention_grad
            and gradient.outputs == whole
        ):
            made[gradient] = fused_instr(gradient, attention_grad_packed, outputs=instr.outputs)
            joined.add(instr)
    block.instrs = [made.get(instr, instr) for instr in block.instrs if instr not in joined]


def _shown(uses: Uses, v: Value, is_turned: bool) -> Optional[Value]:
    """The [b, h, n, d], turned the [b, h, d, n], that a [b * n, h * d] shows, if nobody uses
    anything in between.
    """
    views: List[Tuple[str, Any]] = [
        ("reshape", None),
        ("transpose", HEADS_THIRD),
        ("transpose", SWAPPED),
    ]
    for name, permutation in views[: 2 + is_turned]:
        v = _original(uses, v)
        maker = uses.maker.get(v)
        if (
            maker is None
            or not maker.is_op(name)
            or maker.arguments.get("permutation") != permutation
        ):
            return None
        source: Value = maker.arguments["t"]
        flat, whole = v.spec, source.spec
        if name == "reshape" and (flat.rank, whole.rank, flat.shape[0]) != (
            2,
            4,
            whole.shape[0] * whole.shape[1],
        ):
            return None
        if not uses.is_used_once(v):
            return None
        v = source
    v = _original(uses, v)
    return v if uses.is_used_once(v) else None


def _original(uses: Uses, v: Value) -> Value:
    """What a value is a copy of, if nobody else uses that."""
    while uses.is_used_once(v) and v in uses.maker and uses.maker[v].kind == "copy":
        v = uses.maker[v].arguments["t"]
    return v
