"""Gradients that go straight into their accumulators: products, sums of rows, rows of an embedding
table.
"""

from typing import Any

import torch

from popxl_engine.kernels.linalg import prefers_onednn, product
from popxl_engine.kernels.registry import kernel, kernel_like
from popxl_engine.kernels.rounding import TORCH_HALF_DTYPES
from popxl_engine.kernels.small_products import multiplies_small
from popxl_engine.kernels.var_updates import mean_factors
from popxl_engine.native import library as native

ROWS_AT_A_TIME = 2048
"""Rows of a product that are made before they are added to the accumulator (768 to 1280 rows are
slow with AMX).
"""


@kernel("fused_accumulate_gemm_")
def accumulate_gemm_(
    t: torch.Tensor, lhs: torch.Tensor, rhs: torch.Tensor, step: Any
) -> torch.Tensor:
    """t = t * step / (step + 1) + lhs @ rhs / (step + 1), without a temporary of t's size."""
    if native.adds_product(t, lhs, rhs):
        return _add_product(t, lhs, rhs, step)
    mean = kernel_like("accumulate_mean_", t)
    if t.is_cuda or t.dtype in TORCH_HALF_DTYPES or not t.is_floating_point():
        return mean(t, product(lhs, rhs, lhs.dtype), step)
    is_plain = not prefers_onednn() and not multiplies_small(lhs, rhs)
    if t.dtype == lhs.dtype == torch.float32 and is_plain:
        old, new = mean_factors(step)
        return t.addmm_(lhs, rhs, beta=old, alpha=new)
    for start in range(0, t.shape[0], ROWS_AT_A_TIME):
        rows = slice(start, start + ROWS_AT_A_TIME)
        mean(t[rows], product(lhs[rows], rhs, lhs.dtype), step)
    return t


def _add_product(
    t: torch.Tensor,
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    step: Any,
    sumsq: torch.Tensor | None = None,
) -> torch.Tensor:
    """`accumulate_gemm_` by the library. ``sumsq``: float32 scalar, becomes the sum of the
    squares of t.
    """
    factors = (lhs, *lhs.stride(), rhs, *rhs.stride())
    native.call(
        "accumulate_product",
        (lhs.dtype,),
        *factors,
        t,
        t.stride(0),
        *mean_factors(step),
        *t.shape,
        lhs.shape[1],
        sumsq,
    )
    return t


@kernel("fused_accumulate_gemm_sumsq_")
def accumulate_gemm_sumsq_(
    t: torch.Tensor, lhs: torch.Tensor, rhs: torch.Tensor, step: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """`accumulate_gemm_`, and the sum of the squares of all that t holds then."""
    if native.adds_product(t, lhs, rhs):
        sumsq = t.new_empty(())
        return _add_product(t, lhs, rhs, step, sumsq), sumsq
    accumulate_gemm_(t, lhs, rhs, step)
    return t, kernel_like("sumsquare", t)(t, None, False)


@kernel("fused_accumulate_column_sum_")
def accumulate_column_sum_(t: torch.Tensor, X: torch.Tensor, step: Any) -> torch.Tensor:
    """t = t * step / (step + 1) + X summed over its rows / (step + 1)."""
    if t.dtype == torch.float32 and X.numel() and native.takes(t, X):
        native.call("column_sums", (X.dtype,), X, t, *mean_factors(step), *X.shape)
        return t
    total = kernel_like("sum_to", t)(X, tuple(t.shape), ())
    return kernel_like("accumulate_mean_", t)(t, total, step)


@kernel("fused_accumulate_gather_grad_")
def accumulate_gather_grad_(
    t: torch.Tensor, dy: torch.Tensor, indices: torch.Tensor, zero_OOR: bool, step: Any
) -> torch.Tensor:
    """t = t * step / (step + 1), then dy / (step + 1) added to rows by their indices, outside as
    `gather` says. A t of 16 bits is rounded once.
    """
    is_narrow = t.dtype in TORCH_HALF_DTYPES
    if t.is_cuda or is_narrow:  # the count stays on a GPU
        wide = torch.float32 if is_narrow else t.dtype
        sums = torch.zeros(t.shape, dtype=wide, device=t.device)
        scatter_add_rows_(sums, dy, indices, zero_OOR)
        return kernel_like("accumulate_mean_", t)(t, sums, step)
    flat, rows = _rows_by_index(t, dy, indices, zero_OOR)
    old, new = mean_factors(step)
    scaled = t.mul_(old) if old else t.zero_()
    return scaled.index_add_(0, flat, rows, alpha=new)


@kernel("fused_scatter_add_rows_")
def scatter_add_rows_(
    t: torch.Tensor, dy: torch.Tensor, indices: torch.Tensor, zero_OOR: bool
) -> torch.Tensor:
    """t with dy added to rows by their indices, outside as `gather` says."""
    flat, rows = _rows_by_index(t, dy, indices, zero_OOR)
    return t.index_add_(0, flat, rows)


def _rows_by_index(
    t: torch.Tensor, dy: torch.Tensor, indices: torch.Tensor, zero_OOR: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers of rows of t, what is added to each, of t's type); with zero_OOR what is outside
    becomes zeros, without rows all of it is left out.
    """
    flat = indices.reshape(-1).to(torch.int64)
    rows = dy.reshape(flat.numel(), t.shape[1]).to(t.dtype)
    if not t.shape[0]:
        return flat[:0], rows[:0]
    inside = flat.clamp(0, t.shape[0] - 1)
    if zero_OOR:
        outside = flat != inside
        if t.is_cuda or outside.any():
            rows = rows.masked_fill(outside[:, None], 0)
    return inside, rows
