"""Matrices with all singular values near one. Programs call it by `popxl.extensions`."""

import math
from collections.abc import Sequence
from typing import Any

from popxl.errors import ShapeError
from popxl.opdef import Cost, op
from popxl.ops.checks import check_floating
from popxl.tensor import Tensor, TensorSpec

LONG = 2
"""Columns for each row from which on steps are done on X X^T alone."""
Coefficients = tuple[float, float, float]


@op(differentiable=False)
def newton_schulz(
    t: Tensor,
    coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
    steps: int = 5,
    eps: float = 1e-7,
) -> TensorSpec:
    """Matrices with the singular vectors of these, and singular values near one, by a polynomial
    of odd degree.

        X = t / (|t| + eps), with the Frobenius norm
        steps times: A = X X^T; X = a*X + (b*A + c*A^2) X, with coefficients (a, b, c)

    The default brings singular values from 0.01 to 1 of the largest to between 0.68 and 1.13.
    Operands of 16 bits are multiplied in their own type where the device does that fast, else in
    float32. Products of float32 and float64 are done on X X^T alone where a matrix is long; that
    squares singular values, for which 16 bits do not do.

    Shapes: [..., rows, columns], floating point -> the same.
    Raises:
        ShapeError: with fewer than two axes.
        ValueError: for coefficients that are not three, or a number of steps below one.
        DTypeError: from sessions, if it is not floating point.
    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
    """
    check_floating("newton_schulz", t=t)
    if t.rank < 2:
        raise ShapeError(
            f"newton_schulz: got t {t.spec}; expected at least two axes. Reshape it to a matrix."
        )
    if len(coefficients) != 3 or steps < 1:
        raise ValueError(
            f"newton_schulz: got coefficients {coefficients} and {steps} steps; expected three "
            "numbers, and one step or more."
        )
    return t.spec


def is_by_gram_matrix(shape: Sequence[int], itemsize: int) -> bool:
    """Whether steps are done on the product of the small side alone. itemsize: bytes of an
    element.
    """
    few, many = sorted(shape[-2:])
    return itemsize >= 4 and many >= LONG * few


@newton_schulz.cost
def newton_schulz_cost(y: Tensor, t: Tensor, coefficients: Any, steps: int, eps: float) -> Cost:
    """The products that are done, each a product and a sum for each term of each element."""
    few, many = sorted(t.shape[-2:])
    square, wide = 2 * few**3, 2 * few**2 * many
    if is_by_gram_matrix(t.shape, t.dtype.itemsize):
        flops = 2 * wide + square * (1 + 4 * (steps - 1))
    else:
        flops = steps * (2 * wide + square)
    return Cost(flops=math.prod(t.shape[:-2]) * flops)
