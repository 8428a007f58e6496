"""Gradients of attention's queries, keys and values, written side by side, where one product takes
all three.
"""

from dataclasses import replace
from typing import Any, Dict, List, Optional, Set, Tuple

import torch

from popxl_engine.blocks import Block, Instr, Value
from popxl_engine.rewrites.attention import (
    GRADIENT,
    SWAPPED,
    Operands,
    Seed,
    gradient_by_parts,
    takes_gradient,
    write_gradient,
)
from popxl_engine.rewrites.match import fused
from popxl_engine.rewrites.uses import Uses

HEADS_THIRD = (0, 2, 1, 3)
KEY = 1
"""Which of the three gradients is that of a transpose."""


def attention_grad_rows(
    dy: torch.Tensor,
    query_t: torch.Tensor,
    key: torch.Tensor,
    value_t: torch.Tensor,
    probabilities: Optional[torch.Tensor],
    factors: Optional[torch.Tensor],
    scale: float,
    seed_tensor: Seed,
    p: float,
    mask: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """`attention_grad` of n queries and n keys: rows of the gradients, side by side, [b * n, 3 * h
    * d].
    """
    b, h, n, d = dy.shape
    rows = dy.new_empty(b * n, 3 * h * d)
    places = [part.view(b, n, h, d).transpose(1, 2) for part in rows.split(h * d, 1)]
    operands = Operands(
        dy, query_t, key, value_t, probabilities, factors, scale, seed_tensor, p, mask
    )
    if takes_gradient(operands):
        write_gradient(places, operands)
        return rows
    d_query, d_key_t, d_value = gradient_by_parts(operands)
    for place, t in zip(places, (d_query, d_key_t.transpose(2, 3), d_value)):
        place.copy_(t)
    return rows


ROWS = fused(attention_grad_rows)


def join_gradients(block: Block) -> None:
    """concat of the rows of the three gradients of an attention, which nobody else uses."""
    if not any(instr.definition is GRADIENT for instr in block.instrs):
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
        if gradient is not None and gradient.definition is GRADIENT and gradient.outputs == whole:
            made[gradient] = replace(gradient, definition=ROWS, outputs=instr.outputs)
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
