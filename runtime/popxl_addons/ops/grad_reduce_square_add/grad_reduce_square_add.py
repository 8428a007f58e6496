"""What one gradient adds to the square of the global norm."""

import popxl
from popxl import Tensor, ops
from popxl.ops.utils import cast_if_needed


def grad_reduce_square_add(t: Tensor, loss_scaling: int | float | Tensor) -> Tensor:
    """Sum of (t / loss_scaling)^2 over this replica's elements: a float32 scalar. No collective.

    The sum of t^2 is divided, so that t is read once and not copied. It is infinite where that of
    t^2 is beyond float32, 3.4e38, as with one element above 1.8e19: gradients of a usable size have
    room for a scaling of 2^24 and more.
    """
    total = ops.sumsquare(cast_if_needed(t, popxl.float32))
    if isinstance(loss_scaling, Tensor):
        scaling = cast_if_needed(loss_scaling, popxl.float32)
        return total / scaling / scaling  # a square of the scaling may be infinite
    return (
        total if loss_scaling == 1 else total * (1.0 / (float(loss_scaling) * float(loss_scaling)))
    )
