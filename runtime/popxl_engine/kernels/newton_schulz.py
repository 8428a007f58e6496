"""Newton-Schulz iteration on stacks of matrices, [n, rows, columns] with no more rows than columns
inside.

All products but those with X itself are of polynomials of X X^T: they are symmetric, and commute.
"""

import math
from functools import partial

import torch
from popxl.ops.newton_schulz import Coefficients, is_by_gram_matrix

from popxl_engine.kernels.linalg import matrix_product, multiplies_halves, prefers_onednn
from popxl_engine.kernels.registry import kernel
from popxl_engine.kernels.rounding import TORCH_HALF_DTYPES, as_float32
from popxl_engine.native import library as native

BLOCKS, SMALLEST_BLOCKED = 3, 384
"""Blocks along a side of a symmetric product in float32, of which six of nine are computed; smaller
and 16-bit ones gain nothing.
"""


@kernel("newton_schulz")
def newton_schulz(
    t: torch.Tensor, coefficients: Coefficients, steps: int, eps: float
) -> torch.Tensor:
    """Step by step, or, of long matrices, on the product of the small side alone."""
    rows, columns = t.shape[-2:]
    stack = t.reshape(math.prod(t.shape[:-2]), rows, columns)
    wide = as_float32(stack.mT if rows > columns else stack)
    # by rows first: one sum of a matrix would depend on the number of threads
    norm = wide.square().sum(2).sum(1).sqrt_().add_(eps)
    x = wide / norm[:, None, None]
    is_fast = t.dtype not in TORCH_HALF_DTYPES or multiplies_halves(t)
    x = x.to(t.dtype) if is_fast else x
    if is_by_gram_matrix(t.shape, t.element_size()):
        x = _on_gram_matrix(x, coefficients, steps)
    else:
        x = _step_by_step(x, coefficients, steps)
    return (x.mT if rows > columns else x).reshape(t.shape).to(t.dtype)


def _step_by_step(x: torch.Tensor, coefficients: Coefficients, steps: int) -> torch.Tensor:
    first, third, fifth = coefficients
    for _ in range(steps):
        square = symmetric_product(x, x.mT)
        polynomial = symmetric_product(square, square, fifth, square, third)
        x = stacked_product(polynomial, x, 1.0, x, first)
    return x


def _on_gram_matrix(x: torch.Tensor, coefficients: Coefficients, steps: int) -> torch.Tensor:
    """The polynomials of all steps, found from the first X X^T; X is multiplied once."""
    square = symmetric_product(x, x.mT)
    polynomial = _polynomial(square, coefficients)
    whole = polynomial
    for _ in range(steps - 1):
        square = symmetric_product(polynomial, symmetric_product(polynomial, square))
        polynomial = _polynomial(square, coefficients)
        whole = symmetric_product(polynomial, whole)
    return stacked_product(whole, x)


def _polynomial(square: torch.Tensor, coefficients: Coefficients) -> torch.Tensor:
    """What a step multiplies X by, from its X X^T."""
    first, third, fifth = coefficients
    polynomial = symmetric_product(square, square, fifth, square, third)
    polynomial.diagonal(dim1=1, dim2=2).add_(first)
    return polynomial


def stacked_product(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    alpha: float = 1.0,
    added: torch.Tensor | None = None,
    beta: float = 0.0,
    *,
    is_symmetric: bool = False,
) -> torch.Tensor:
    """alpha * lhs @ rhs + beta * added, [n, rows, k] @ [n, k, columns].

    Where the result is known to be symmetric, and so is what is added, blocks below the diagonal
    are those above it.
    """
    rows, is_float32 = lhs.shape[1], lhs.dtype == torch.float32 and not lhs.is_cuda
    if is_symmetric and is_float32 and rows >= SMALLEST_BLOCKED and not rows % BLOCKS:
        size = rows // BLOCKS
        y = lhs.new_empty(lhs.shape[0], rows, rows)
        for i in range(BLOCKS):
            own, right = slice(i * size, (i + 1) * size), slice(i * size, rows)
            block = None if added is None else added[:, own, right]
            y[:, own, right] = stacked_product(lhs[:, own], rhs[:, :, right], alpha, block, beta)
            y[:, (i + 1) * size :, own] = y[:, own, (i + 1) * size :].mT
        return y
    if is_float32 and len(lhs) and (prefers_onednn() or native.multiplies(lhs[0], rhs[0])):
        y = torch.stack([matrix_product(a, b) for a, b in zip(lhs, rhs)])
        y = y if alpha == 1.0 else y.mul_(alpha)
        return y if added is None else y.add_(added, alpha=beta)
    if added is None:
        return torch.bmm(lhs, rhs)
    return torch.baddbmm(added, lhs, rhs, beta=beta, alpha=alpha)


symmetric_product = partial(stacked_product, is_symmetric=True)
