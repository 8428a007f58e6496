"""Random matrices for the compiled kernels."""

import torch
from popxl_engine.kernels.registry import ALTERNATES

NATIVE = ALTERNATES["cpu"]


def random(
    *shape: int, dtype: torch.dtype = torch.float32, scale: float = 3, seed: int = 0
) -> torch.Tensor:
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale
    ).to(dtype)


def matrix(rows: int, columns: int, is_transposed: bool, seed: int) -> torch.Tensor:
    shape = (columns, rows) if is_transposed else (rows, columns)
    t = random(*shape, dtype=torch.bfloat16, scale=1, seed=seed)
    return t.t() if is_transposed else t
