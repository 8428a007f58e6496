"""Products of matrices with what is added to them: a bias, or scale and mask of attention's
scores.
"""

import torch

from popxl_engine.kernels.linalg import (
    matrix_product,
    multiplied,
    multiplies_halves,
    product,
    rows_on_boundaries,
)
from popxl_engine.kernels.registry import kernel
from popxl_engine.kernels.rounding import TORCH_HALF_DTYPES
from popxl_engine.kernels.small_products import multiplies_small
from popxl_engine.native import library as native

TILE_ROW = 64
"""Bytes of a row of a tile: a product whose rows begin on such boundaries is not packed when it is
multiplied again.
"""


@kernel("fused_gemm_bias")
def gemm_bias(lhs: torch.Tensor, rhs: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """lhs @ rhs + bias: [m, k], [k, n], [n] -> [m, n]."""
    is_slow = lhs.dtype in TORCH_HALF_DTYPES and not multiplies_halves(lhs)
    if is_slow and not native.multiplies_few(lhs, rhs):
        return product(lhs, rhs, torch.float32).add_(bias).to(lhs.dtype)
    return matrix_product(lhs, rhs, bias)


@kernel("fused_masked_scores")
def masked_scores(
    lhs: torch.Tensor, rhs: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """lhs @ rhs * scale + mask in one pass over the result: [..., m, k], [..., k, n], [m, n] ->
    [..., m, n].
    """
    is_slow = lhs.dtype in TORCH_HALF_DTYPES and not multiplies_halves(lhs)
    if is_slow or multiplies_small(lhs, rhs):
        return product(lhs, rhs, torch.float32).mul_(scale).add_(mask).to(lhs.dtype)
    shape = (*lhs.shape[:-1], rhs.shape[-1])
    left, right = lhs.flatten(0, -3), rhs.flatten(0, -3)
    return torch.baddbmm(mask.expand(left.shape[0], *mask.shape), left, right, alpha=scale).reshape(
        shape
    )


@kernel("fused_gemm")
def gemm(lhs: torch.Tensor, rhs: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """lhs @ rhs, plus a bias where there is one: by the library's tiles where it has them."""
    if not native.multiplies(lhs, rhs):
        return product(lhs, rhs, lhs.dtype) if bias is None else gemm_bias(lhs, rhs, bias)
    y = rows_on_boundaries(lhs.shape[0], rhs.shape[1], lhs, TILE_ROW)
    return multiplied(lhs, rhs, bias, y)
