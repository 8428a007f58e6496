"""What one gradient adds to the square of the global norm."""

import popxl
from popxl import Tensor, ops
from popxl.ops.utils import cast_if_needed


def grad_reduce_square_add(t: Tensor, loss_scaling: int | float | Tensor) -> Tensor:
    """Sum of (t / loss_scaling)^2 over this replica's elements: a float32 scalar. No collective."""
    total = ops.sumsquare(cast_if_needed(t, popxl.float32))
    if isinstance(loss_scaling, Tensor):
        scaling = cast_if_needed(loss_scaling, popxl.float32)
        return total / (scaling * scaling)
    return (
        total if loss_scaling == 1 else total * (1.0 / (float(loss_scaling) * float(loss_scaling)))
    )
