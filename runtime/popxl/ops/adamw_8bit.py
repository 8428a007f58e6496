"""AdamW with moments of 8 bits. Programs call it by `popxl.extensions`."""

from typing import Any

from popxl.dtypes import bool as bool_
from popxl.dtypes import uint8
from popxl.errors import DTypeError, ShapeError
from popxl.moments import coded_length
from popxl.opdef import Cost, op
from popxl.ops.checks import check_floating, check_scalar
from popxl.tensor import Tensor, TensorSpec

Scalar = float | Tensor


@op(writes=("var", "first", "second"), differentiable=False, rounds=True, names="updated__{var}")
def adamw_8bit_(
    var: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    step: Tensor,
    lr: Scalar,
    beta1: Scalar = 0.9,
    beta2: Scalar = 0.999,
    epsilon: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    scale: Scalar = 1.0,
    condition: Tensor | None = None,
) -> TensorSpec:
    """One AdamW step, whose moments are kept in 8 bits a number, as `popxl.moments` says.

        g = grad * scale; m = beta1*m + (1-beta1)*g; v = beta2*v + (1-beta2)*g^2
        u = (m / (1-beta1^step)) / (sqrt(v / (1-beta2^step)) + epsilon) + weight_decay*var
        var -= lr*u

    Steps are computed in float32, and the update is made from the moments before they are rounded
    again. With the session option ``enableStochasticRounding`` they are rounded stochastically, and
    so is a var of 16 bits; else to the nearest.

    Shapes: var and grad [a], floating point; first and second uint8
        [popxl.moments.coded_length(elements of var)]; all others of one element -> [a].
    Args:
        step: the number of this step, counted from 1.
        condition: a bool; where it is false, no bit changes. None: the step is done.
    Raises:
        ShapeError: for other shapes.
        DTypeError: for moments that are not uint8, or a condition that is no bool; from sessions,
            if var or grad is not floating point.
    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2; Dettmers et al. 2022,
    arXiv:2110.02861.
    """
    check_floating("adamw_8bit_", var=var, grad=grad)
    if grad.shape != var.shape:
        raise ShapeError(
            f"adamw_8bit_: got var {var.spec} and grad {grad.spec}; expected equal shapes. Reshape "
            "one of them."
        )
    expected = (coded_length(var.nelms),)
    for name, moment in (("first", first), ("second", second)):
        if moment.dtype is not uint8:
            raise DTypeError(
                f"adamw_8bit_: got {name} {moment.spec}; expected uint8, codes of 8 bits. Make "
                "the moment of zeros."
            )
        if moment.shape != expected:
            raise ShapeError(
                f"adamw_8bit_: got {name} {moment.spec} for var {var.spec}; expected "
                f"uint8{list(expected)}: a byte for each element, and one for each 32. Make it "
                "with popxl.moments.coded_length."
            )
    if condition is not None and condition.dtype is not bool_:
        raise DTypeError(
            f"adamw_8bit_: got condition {condition.spec}; expected a bool. Compare it first."
        )
    factors = {"step": step, "lr": lr, "beta1": beta1, "beta2": beta2, "epsilon": epsilon}
    factors |= {"weight_decay": weight_decay, "scale": scale}
    for name, value in (factors | ({} if condition is None else {"condition": condition})).items():
        check_scalar("adamw_8bit_", name, value)
    return var.spec


@adamw_8bit_.cost
def adamw_8bit_cost(y: Tensor, *arguments: Any) -> Cost:
    """Both moments, the update and its subtraction, 18; and each moment's codes both ways."""
    return Cost(flops=(18 + 2 * CODING) * y.nelms)


CODING = 8
"""Operations that a number's code takes, to float32 and back."""
