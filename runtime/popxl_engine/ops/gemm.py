"""Products of matrices with what is added to them: a bias, or scale and mask of attention's
scores.
"""

from popxl.op_records import Cost
from popxl.tensor import TensorSpec

from popxl_engine.ops.definition import check, flops_of, fused_op


def _infer(
    name: str, lhs: TensorSpec, rhs: TensorSpec, bias: TensorSpec | None = None
) -> TensorSpec:
    fits = lhs.rank == rhs.rank == 2 and lhs.shape[1] == rhs.shape[0] and lhs.dtype is rhs.dtype
    fits = fits and lhs.dtype.is_floating_point
    if bias is not None:
        fits = fits and bias.shape == rhs.shape[1:] and bias.dtype is lhs.dtype
    expected = "[m, k], [k, n] and a bias [n] of one floating-point dtype"
    check(fits, name, expected, lhs=lhs, rhs=rhs, bias=bias)
    return TensorSpec((lhs.shape[0], rhs.shape[1]), lhs.dtype)


def gemm_cost(y: TensorSpec, lhs: TensorSpec, rhs: TensorSpec, bias: TensorSpec | None) -> Cost:
    """The product, and an addition per element where there is a bias."""
    added = 0 if bias is None else flops_of("add", y)
    return Cost(flops=flops_of("matmul", y, lhs, rhs) + added)


@fused_op(cost=gemm_cost)
def gemm(lhs: TensorSpec, rhs: TensorSpec, bias: TensorSpec | None) -> TensorSpec:
    """lhs @ rhs, plus a bias where there is one, by the library's tiles where it has them.

    Shapes: lhs [m, k], rhs [k, n], bias [n] -> [m, n].
    """
    return _infer("gemm", lhs, rhs, bias)


@fused_op(cost=gemm_cost)
def gemm_bias(lhs: TensorSpec, rhs: TensorSpec, bias: TensorSpec) -> TensorSpec:
    """lhs @ rhs + bias.

    Shapes: lhs [m, k], rhs [k, n], bias [n] -> [m, n].
    """
    return _infer("gemm_bias", lhs, rhs, bias)


def masked_scores_cost(
    y: TensorSpec, lhs: TensorSpec, rhs: TensorSpec, mask: TensorSpec, scale: float
) -> Cost:
    """The product, a scaling and an addition per element."""
    return Cost(flops=flops_of("matmul", y, lhs, rhs) + flops_of("mul", y) + flops_of("add", y))


@fused_op(cost=masked_scores_cost)
def masked_scores(lhs: TensorSpec, rhs: TensorSpec, mask: TensorSpec, scale: float) -> TensorSpec:
    """lhs @ rhs * scale + mask, in one pass over the result.

    Shapes: lhs [..., m, k], rhs [..., k, n], mask [m, n] -> [..., m, n].
    """
    fits = lhs.rank == rhs.rank >= 3 and lhs.shape[:-2] == rhs.shape[:-2]
    shape = (*lhs.shape[:-1], *rhs.shape[-1:])
    fits = fits and lhs.shape[-1] == rhs.shape[-2] and mask.shape == shape[-2:]
    check(
        fits and lhs.dtype is rhs.dtype is mask.dtype and lhs.dtype.is_floating_point,
        "masked_scores",
        "[..., m, k], [..., k, n] and [m, n] of one floating-point dtype",
        lhs=lhs,
        rhs=rhs,
        mask=mask,
    )
    return TensorSpec(shape, lhs.dtype)
