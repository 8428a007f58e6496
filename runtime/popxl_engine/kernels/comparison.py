"""Elementwise comparisons, logic and classification."""

from collections.abc import Callable

import torch

from popxl_engine.kernels.dtypes import computable, ordered
from popxl_engine.kernels.registry import kernel


def _true(t: torch.Tensor) -> torch.Tensor:
    """The elements where t is not zero."""
    return t if t.dtype == torch.bool else computable(t) != 0


@kernel("equal")
def equal(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """lhs == rhs."""
    return torch.eq(ordered(lhs), ordered(rhs))


@kernel("greater")
def greater(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """input > other."""
    return torch.gt(ordered(input), ordered(other))


@kernel("logical_and")
def logical_and(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """Both true."""
    return _true(lhs) & _true(rhs)


@kernel("logical_or")
def logical_or(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """One or both true."""
    return _true(lhs) | _true(rhs)


@kernel("logical_not")
def logical_not(t: torch.Tensor) -> torch.Tensor:
    """Not true."""
    return ~_true(t)


Classification = Callable[[torch.Tensor], torch.Tensor]


def _classification(fn: Classification) -> Classification:
    def run(t: torch.Tensor) -> torch.Tensor:
        return fn(t)

    return run


kernel("isfinite")(_classification(torch.isfinite))
kernel("isinf")(_classification(torch.isinf))
kernel("isnan")(_classification(torch.isnan))
