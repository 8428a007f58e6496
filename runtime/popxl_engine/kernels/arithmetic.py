"""Elementwise arithmetic."""

from typing import Callable

import torch

from popxl_engine.kernels.dtypes import LIMITED
from popxl_engine.kernels.registry import kernel

Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def binary(fn: Binary) -> Binary:
    """A kernel for every element type: unsigned integers without torch arithmetic go through int64."""

    def run(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
        if lhs.dtype in LIMITED:
            return fn(lhs.to(torch.int64), rhs.to(torch.int64)).to(lhs.dtype)
        return fn(lhs, rhs)

    return run


kernel("add")(binary(torch.add))


@kernel("add_")
def add_(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """lhs += rhs."""
    if lhs.dtype in LIMITED:
        return lhs.copy_((lhs.to(torch.int64) + rhs.to(torch.int64)).to(lhs.dtype))
    return lhs.add_(rhs)
