"""Gradients that go straight into their accumulators: products, sums of rows, rows of an embedding
table.
"""

from typing import Any

from popxl import dtypes
from popxl.op_records import Cost
from popxl.tensor import TensorSpec

from popxl_engine.ops.definition import check, flops_of, fused_op


def _check_product(name: str, t: TensorSpec, lhs: TensorSpec, rhs: TensorSpec) -> None:
    fits = t.rank == lhs.rank == rhs.rank == 2 and lhs.shape[1] == rhs.shape[0]
    fits = fits and t.shape == (lhs.shape[0], rhs.shape[1]) and lhs.dtype is rhs.dtype
    check(fits, name, "[m, n], [m, k], [k, n], the last two of one dtype", t=t, lhs=lhs, rhs=rhs)


def accumulate_gemm_cost(
    y: TensorSpec, t: TensorSpec, lhs: TensorSpec, rhs: TensorSpec, step: Any
) -> Cost:
    """The product, and the mean."""
    return Cost(flops=flops_of("matmul", t, lhs, rhs) + flops_of("accumulate_mean_", t))


@fused_op(cost=accumulate_gemm_cost, writes=("t",))
def accumulate_gemm_(t: TensorSpec, lhs: TensorSpec, rhs: TensorSpec, step: Any) -> TensorSpec:
    """t = t * step / (step + 1) + lhs @ rhs / (step + 1), without a temporary of t's size.

    Shapes: t [m, n], lhs [m, k], rhs [k, n], step of one element, or a number -> t.
    """
    _check_product("accumulate_gemm_", t, lhs, rhs)
    return t


def accumulate_gemm_sumsq_cost(
    y: Any, t: TensorSpec, lhs: TensorSpec, rhs: TensorSpec, step: Any
) -> Cost:
    """The product, the mean, and a square and a sum per element."""
    accumulated = accumulate_gemm_cost(t, t, lhs, rhs, step)
    return Cost(flops=accumulated.flops + flops_of("sumsquare", t, t, None, False))


@fused_op(cost=accumulate_gemm_sumsq_cost, writes=("t",))
def accumulate_gemm_sumsq_(
    t: TensorSpec, lhs: TensorSpec, rhs: TensorSpec, step: Any
) -> tuple[TensorSpec, TensorSpec]:
    """`accumulate_gemm_`, and the sum of the squares of all that t holds then.

    Shapes: t [m, n], float32, lhs [m, k], rhs [k, n], step of one element, or a number -> t, [].
    """
    _check_product("accumulate_gemm_sumsq_", t, lhs, rhs)
    check(t.dtype is dtypes.float32, "accumulate_gemm_sumsq_", "a t in float32", t=t)
    return t, TensorSpec((), t.dtype)


def accumulate_column_sum_cost(y: TensorSpec, t: TensorSpec, X: TensorSpec, step: Any) -> Cost:
    """An addition per element of X, and the mean."""
    return Cost(flops=flops_of("sum_to", t, X, t.shape, ()) + flops_of("accumulate_mean_", t))


@fused_op(cost=accumulate_column_sum_cost, writes=("t",))
def accumulate_column_sum_(t: TensorSpec, X: TensorSpec, step: Any) -> TensorSpec:
    """t = t * step / (step + 1) + X summed over its rows / (step + 1).

    Shapes: t [n], X [m, n], step of one element, or a number -> t.
    """
    fits = X.rank == 2 and t.shape == X.shape[1:]
    check(fits, "accumulate_column_sum_", "t [n] and X [m, n]", t=t, X=X)
    return t


def _check_rows(name: str, t: TensorSpec, dy: TensorSpec, indices: TensorSpec) -> None:
    fits = t.rank == 2 and dy.nelms == indices.nelms * t.shape[1]
    check(fits, name, "[rows, n], [..., n] and indices [...]", t=t, dy=dy, indices=indices)


def accumulate_gather_grad_cost(
    y: TensorSpec, t: TensorSpec, dy: TensorSpec, indices: TensorSpec, zero_OOR: bool, step: Any
) -> Cost:
    """An addition per element of dy, and the mean."""
    return Cost(flops=flops_of("gather_grad", t, dy) + flops_of("accumulate_mean_", t))


@fused_op(cost=accumulate_gather_grad_cost, writes=("t",))
def accumulate_gather_grad_(
    t: TensorSpec, dy: TensorSpec, indices: TensorSpec, zero_OOR: bool, step: Any
) -> TensorSpec:
    """t = t * step / (step + 1), then dy / (step + 1) added to rows by their indices.

    Shapes: t [rows, n], dy [..., n], indices [...], step of one element, or a number -> t.
    Args:
        zero_OOR: of an index outside: whether nothing is added; else it counts as the nearest.
    """
    _check_rows("accumulate_gather_grad_", t, dy, indices)
    return t


def scatter_add_rows_cost(
    y: TensorSpec, t: TensorSpec, dy: TensorSpec, indices: TensorSpec, zero_OOR: bool
) -> Cost:
    """An addition per element of dy."""
    return Cost(flops=flops_of("gather_grad", t, dy))


@fused_op(cost=scatter_add_rows_cost, writes=("t",))
def scatter_add_rows_(
    t: TensorSpec, dy: TensorSpec, indices: TensorSpec, zero_OOR: bool
) -> TensorSpec:
    """t with dy added to rows by their indices.

    Shapes: t [rows, n], dy [..., n], indices [...] -> t.
    Args:
        zero_OOR: of an index outside: whether nothing is added; else it counts as the nearest.
    """
    _check_rows("scatter_add_rows_", t, dy, indices)
    return t
