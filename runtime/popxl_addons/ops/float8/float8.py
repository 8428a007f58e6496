"""Products in 8 bits that a model is trained through.

Values and weights are rounded to float8_e4m3fn, gradients to float8_e5m2, each tensor with one
scale that comes from its largest element alone: it has the same bits whenever it is rounded.
"""

from typing import Any

from popxl import ReplicaGrouping, Tensor, dtype, float32, ops
from popxl.extensions import amax, float8_e5m2, float8_matmul, to_float8
from popxl.ops.casting import cast_if_needed

from popxl_addons.ops.own_gradient import with_gradient


def with_scale(
    t: Tensor, data_type: dtype, group: ReplicaGrouping | None = None
) -> tuple[Tensor, Tensor]:
    """A tensor rounded to float8, and the largest magnitude that its scale comes from. Its gradient
    is that of the rounded numbers.

    Shapes: t [a], 16 or 32 bits wide -> [a] of data_type, and [], float32.
    Args:
        group: replicas that hold parts of one tensor, which all get the scale of the whole; None:
            this one has all of it.
    """
    largest = amax(t)
    if group is not None and group.group_size > 1:
        largest = ops.collectives.replicated_all_reduce(largest, "max", group)
    arguments = {"t": t, "amax": largest, "data_type": data_type}
    rounded = with_gradient(
        to_float8, arguments, lambda dy, *_, **__: (cast_if_needed(dy, t.dtype), None)
    )
    return rounded, largest


def float8_product(
    lhs: Tensor,
    rhs: Tensor,
    lhs_amax: Tensor,
    rhs_amax: Tensor,
    output_type: dtype,
    group: ReplicaGrouping | None = None,
) -> Tensor:
    """`popxl.extensions.float8_matmul` of two tensors of float8_e4m3fn. Its gradient is rounded to
    float8_e5m2, with a scale of its own, and multiplied by each of them: lhs's is of the gradient's
    type, rhs's float32.

    Args:
        group: replicas that hold parts of one result, whose gradient has one scale; None: this one
            has all of it.
    """
    arguments = {
        "lhs": lhs,
        "rhs": rhs,
        "lhs_amax": lhs_amax,
        "rhs_amax": rhs_amax,
        "output_type": output_type,
    }

    def gradients(
        dy: Tensor,
        y: Tensor,
        lhs: Tensor,
        rhs: Tensor,
        lhs_amax: Tensor,
        rhs_amax: Tensor,
        *_: Any,
    ) -> tuple[Tensor | None, ...]:
        narrow, largest = with_scale(dy, float8_e5m2, group)
        dlhs = float8_matmul(narrow, ops.transpose(rhs, (1, 0)), largest, rhs_amax, dy.dtype)
        drhs = float8_matmul(ops.transpose(lhs, (1, 0)), narrow, lhs_amax, largest, float32)
        return dlhs, drhs, None, None

    return with_gradient(float8_matmul, arguments, gradients)
