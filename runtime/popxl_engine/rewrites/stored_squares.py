"""Squares of a gradient, summed up where the product stores it: nothing reads the gradient again
for its norm.
"""

from typing import Any, Tuple

import torch

from popxl_engine import native
from popxl_engine.rewrites.accumulate import accumulate_product_, add_product_
from popxl_engine.rewrites.match import fused, kernel_like


def accumulate_product_squares_(
    t: torch.Tensor, lhs: torch.Tensor, rhs: torch.Tensor, step: Any
) -> Tuple[torch.Tensor, torch.Tensor]:
    """`accumulate_product_`, and the sum of the squares of all that t holds then."""
    if native.adds_product(t, lhs, rhs):
        squares = t.new_empty(())
        return add_product_(t, lhs, rhs, step, squares), squares
    accumulate_product_(t, lhs, rhs, step)
    return t, kernel_like("sumsquare", t)(t, None, False)


PRODUCT_SQUARES = fused(accumulate_product_squares_, writes=("t",))
