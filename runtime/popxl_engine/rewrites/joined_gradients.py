"""Gradients of attention's queries, keys and values, written side by side, where one product takes
all three.
"""

from typing import Optional

import torch

from popxl_engine.rewrites.attention import (
    Operands,
    Seed,
    gradient_by_parts,
    takes_gradient,
    write_gradient,
)
from popxl_engine.rewrites.match import fused

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
