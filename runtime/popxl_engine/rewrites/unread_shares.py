"""Attention whose probabilities nobody reads gives its result alone, and keeps no memory for
them.
"""

import torch

from popxl_engine.rewrites.attention import Seed, attend
from popxl_engine.rewrites.match import fused


def attention_alone(
    query: torch.Tensor,
    key_t: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    seed_tensor: Seed,
    p: float,
) -> torch.Tensor:
    """The last result of `attention`, in the same bits."""
    (y,) = attend(query, key_t, value, mask, scale, seed_tensor, p, keeps_shares=False)
    return y


ALONE = fused(attention_alone)
