"""Broadcasting and its inverse. Not in PopXL's API: gradients of broadcasts and reductions are
built from these.
"""

import numpy as np

from popxl import dtypes
from popxl.errors import ShapeError
from popxl.opdef import Cost, op
from popxl.tensor import Tensor, TensorSpec, make_constant


@op
def broadcast_to(t: Tensor, shape: tuple[int, ...], new_axes: tuple[int, ...] = ()) -> TensorSpec:
    """Repeat a tensor to a shape, as numpy broadcasts.

    Shapes: t [a] -> shape, any dtype.
    Args:
        new_axes: axes of the result, ascending, that t lacks: size-1 axes are put there first.
    Raises:
        ShapeError: if t, with those axes, does not broadcast to shape.
    """
    with_axes = list(t.shape)
    for axis in new_axes:
        with_axes.insert(axis, 1)
    try:
        fits = np.broadcast_shapes(tuple(with_axes), shape) == tuple(shape)
    except ValueError:
        fits = False
    if not fits:
        raise ShapeError(
            f"broadcast_to: got t {t.spec} with new axes {list(new_axes)} and shape "
            f"{list(shape)}; expected t to broadcast to that shape."
        )
    return TensorSpec(shape, t.dtype, t.meta_shape if tuple(shape) == t.shape else ())


@broadcast_to.vjp
def broadcast_to_vjp(
    dy: Tensor, y: Tensor, t: Tensor, shape: tuple[int, ...], new_axes: tuple[int, ...]
) -> Tensor:
    """Sum over the repeats."""
    return sum_to(dy, t.shape, new_axes)


@broadcast_to.cost
def broadcast_to_cost(
    y: Tensor, t: Tensor, shape: tuple[int, ...], new_axes: tuple[int, ...]
) -> Cost:
    """Moves data only."""
    return Cost()


def positions_along(shape: tuple[int, ...], axis: int) -> Tensor:
    """0, 1, .. along an axis, the same over the others: int32 of ``shape``."""
    line = [-1 if a == axis % len(shape) else 1 for a in range(len(shape))]
    positions = np.arange(shape[axis], dtype=np.int32).reshape(line)
    return broadcast_to(make_constant(positions, dtypes.int32, None), shape)


@op(name="sum_to")
def _sum_to(t: Tensor, shape: tuple[int, ...], dropped: tuple[int, ...] = ()) -> TensorSpec:
    """Sum a tensor to a shape that broadcasts to its own: the inverse of `broadcast_to`. 16-bit
    types sum in float32.

    Shapes: t [a] -> shape, t's dtype.
    Args:
        dropped: axes of t, ascending, that the result lacks.
    """
    return TensorSpec(shape, t.dtype)


def sum_to(t: Tensor, shape: tuple[int, ...], dropped: tuple[int, ...] = ()) -> Tensor:
    """Sum ``t`` to ``shape``, undoing a broadcast; ``t`` itself where there was none. See
    `broadcast_to`.
    """
    return t if t.shape == tuple(shape) else _sum_to(t, tuple(shape), dropped)


@_sum_to.vjp
def sum_to_vjp(
    dy: Tensor, y: Tensor, t: Tensor, shape: tuple[int, ...], dropped: tuple[int, ...]
) -> Tensor:
    """Repeat the gradient along the summed axes."""
    return broadcast_to(dy, t.shape, dropped)


@_sum_to.cost
def sum_to_cost(y: Tensor, t: Tensor, shape: tuple[int, ...], dropped: tuple[int, ...]) -> Cost:
    """One addition per element summed."""
    return Cost(flops=t.nelms)
