"""Operands of attention, masks, and the ways in which its kernel runs."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.products import WAYS
from helpers.quick import cases

COMPILED = cases(WAYS, lambda way: way in ("compiled", "vectors"))


ways = pytest.mark.parametrize("way", [*COMPILED, "parts"])
"""The ways of the compiled kernels, and op by op."""


dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)


SHAPES = [
    (2, 3, 64, 64, 32),
    (1, 2, 40, 70, 24),
    (1, 1, 1, 2, 8),
    (2, 2, 33, 96, 64),
    (4, 1, 32, 160, 40),
]
"""Batch, heads, queries, keys, size of a head."""


def normal(dtype: torch.dtype, *shape: int, seed: int, is_nested: bool = False) -> torch.Tensor:
    """Normal numbers; nested: heads lie within rows, as projections leave them."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return numbers.transpose(1, 2).contiguous().transpose(1, 2) if is_nested else numbers


def hiding(queries: int, keys: int, band: int, dtype: torch.dtype) -> torch.Tensor:
    """Queries see the keys up to their own, at most `band` of them; the last query sees the last
    key.
    """
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    return torch.where((distance >= 0) & (distance < band), 0.0, -math.inf).to(dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


DATA = {
    n: np.random.default_rng(i).normal(size=(2, 6, 4, 8)).astype(np.float32)
    for i, n in enumerate("qkvd")
}


MASK = np.triu(np.full((6, 6), -np.inf, np.float32), k=1)


def textbook(
    tensors: Sequence[torch.Tensor], mask: torch.Tensor, scale: float, kept: torch.Tensor | None
) -> Any:
    """(probabilities, result, gradients of query, key and value), by autograd in float64."""
    query, key, value, dy = (t.double().requires_grad_() for t in tensors)
    probs = torch.softmax(query @ key.transpose(2, 3) * scale + mask.double(), -1)
    y = (probs if kept is None else probs * kept) @ value
    return (probs.detach(), y.detach(), *torch.autograd.grad(y, (query, key, value), dy.detach()))
