"""Gradients of attention's queries, keys and values, written side by side, where one product takes all three."""

from typing import Any, List, Optional, Tuple

import torch
from popxl.graph import Graph
from popxl.values import Tensor

from popxl_engine.rewrites.attention import (
    GRADIENT,
    SWAPPED,
    Operands,
    Seed,
    gradient_by_parts,
    takes_gradient,
    write_gradient,
)
from popxl_engine.rewrites.match import Steps, fused
from popxl_engine.steps import Step

HEADS_THIRD = (0, 2, 1, 3)
KEY = 1
"""Which of the three gradients is that of a transpose."""


def attention_grad_rows(
    dy: torch.Tensor,
    query_t: torch.Tensor,
    key: torch.Tensor,
    value_t: torch.Tensor,
    probabilities: torch.Tensor,
    factors: torch.Tensor,
    scale: float,
    seed_tensor: Seed,
    p: float,
    mask: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """`attention_grad` of n queries and n keys: rows of the gradients, side by side, [b * n, 3 * h * d]."""
    b, h, n, d = dy.shape
    rows = dy.new_empty(b * n, 3 * h * d)
    places = [part.view(b, n, h, d).transpose(1, 2) for part in rows.split(h * d, 1)]
    operands = Operands(dy, query_t, key, value_t, probabilities, factors, scale, seed_tensor, p, mask)
    if takes_gradient(operands):
        write_gradient(places, operands)
        return rows
    d_query, d_key_t, d_value = gradient_by_parts(operands)
    for place, t in zip(places, (d_query, d_key_t.transpose(2, 3), d_value)):
        place.copy_(t)
    return rows


ROWS = fused(attention_grad_rows)


def join_gradients(steps: List[Step], graph: Graph) -> List[Step]:
    """concat of the rows of the three gradients of an attention, which nobody else uses."""
    found = Steps(steps, graph)
    for i, step in enumerate(steps):
        if step.definition.name != "concat" or step.arguments["axis"] != 1 or len(step.arguments["ts"]) != 3:
            continue
        paths = [_rows_of(found, t, n == KEY) for n, t in enumerate(step.arguments["ts"])]
        whole = [path for path in paths if path is not None]
        maker = found.maker.get(whole[0][0]) if len(whole) == 3 else None
        if maker is None or steps[maker].definition is not GRADIENT or found.writes_between(maker, i):
            continue
        if steps[maker].outputs == tuple(t for t, _ in whole):
            views = [n for _, between in whole for n in between]
            found.replace(i, Step(ROWS, steps[maker].arguments, step.outputs, steps[maker].source), maker, *views)
    return found.result()


def _rows_of(found: Steps, t: Any, is_turned: bool) -> Optional[Tuple[Tensor, List[int]]]:
    """(the [b, h, n, d], turned the [b, h, d, n], that a [b * n, h * d] shows, the views between that alone use it)."""
    views: List[int] = []
    for name, permutation in [("reshape", None), ("transpose", HEADS_THIRD), ("transpose", SWAPPED)][: 2 + is_turned]:
        index = found.made_by(t, name)
        if index is None or found.steps[index].arguments.get("permutation") != permutation:
            return None
        source: Tensor = found.steps[index].arguments["t"]
        if name == "reshape" and (t.rank, source.rank, t.shape[0]) != (2, 4, source.shape[0] * source.shape[1]):
            return None
        views.append(index)
        t = source
    return (t, views) if found.used_only_by(t, views[-1:]) else None
