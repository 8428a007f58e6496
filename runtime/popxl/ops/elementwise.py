"""Elementwise functions and activations, with their in-place forms."""

import math
from typing import Any

from popxl.opdef import Cost, OpFunction, inplace, op
from popxl.ops.arithmetic import div, mul, negate, scale
from popxl.ops.checks import check_floating, unary
from popxl.tensor import Tensor, TensorSpec

TRANSCENDENTAL = 8
"""Operations that an exponential, a logarithm or a hyperbolic tangent counts for in cost rules."""


def _grad_op(name: str, doc: str, flops: int) -> OpFunction[..., Tensor]:
    """An op ``(dy, at) -> gradient`` of an elementwise function, whose derivative is a function of
    ``at``.
    """

    def fn(dy: Tensor, at: Tensor) -> TensorSpec:
        check_floating(name, dy=dy, at=at)
        return dy.spec

    fn.__name__, fn.__module__ = name, __name__
    fn.__doc__ = f"{doc}\n\nShapes: dy and at [a], floating point of one dtype -> [a]."
    result = op(differentiable=False)(fn)
    result.cost(lambda y, dy, at: Cost(flops=flops * y.nelms))
    return result


relu_grad = _grad_op("relu_grad", "Gradient of relu from its result: dy where at > 0, else 0.", 1)
relu2_grad = _grad_op("relu2_grad", "Gradient of relu2 from its operand: 2 * dy * max(at, 0).", 2)
tanh_grad = _grad_op("tanh_grad", "Gradient of tanh from its result: dy * (1 - at**2).", 3)
gelu_grad = _grad_op("gelu_grad", "Gradient of gelu from its operand.", 2 * TRANSCENDENTAL)
geluerf_grad = _grad_op("geluerf_grad", "Gradient of geluerf from its operand.", 2 * TRANSCENDENTAL)
swish_grad = _grad_op("swish_grad", "Gradient of swish from its operand.", 2 * TRANSCENDENTAL)

exp = unary("exp", "Elementwise e**t.", lambda dy, y, t: mul(dy, y), flops=TRANSCENDENTAL)
exp_ = inplace(exp, "t")
log = unary(
    "log", "Elementwise natural logarithm.", lambda dy, y, t: div(dy, t), flops=TRANSCENDENTAL
)
log2 = unary(
    "log2",
    "Elementwise logarithm to base 2.",
    lambda dy, y, t: div(scale(dy, 1 / math.log(2)), t),
    flops=TRANSCENDENTAL,
)
sqrt = unary("sqrt", "Elementwise square root.", lambda dy, y, t: div(scale(dy, 0.5), y))
sin = unary(
    "sin", "Elementwise sine, t in radians.", lambda dy, y, t: mul(dy, cos(t)), flops=TRANSCENDENTAL
)
cos: Any = unary(
    "cos",
    "Elementwise cosine, t in radians.",
    lambda dy, y, t: negate(mul(dy, sin(t))),
    flops=TRANSCENDENTAL,
)
tanh = unary(
    "tanh",
    "Elementwise hyperbolic tangent.",
    lambda dy, y, t: tanh_grad(dy, y),
    flops=TRANSCENDENTAL,
)
ceil = unary("ceil", "Elementwise smallest integer not below t.", lambda dy, y, t: None)
floor = unary("floor", "Elementwise largest integer not above t.", lambda dy, y, t: None)

relu = unary("relu", "Elementwise max(t, 0).", lambda dy, y, t: relu_grad(dy, y))
relu_ = inplace(relu, "t")
relu2 = unary(
    "relu2",
    "Elementwise max(t, 0)**2. Programs call `popxl.extensions.relu2`.\n\n"
    "Source: So et al. 2021, arXiv:2109.08668, section 3.1.",
    lambda dy, y, t: relu2_grad(dy, t),
    flops=2,
)
gelu = unary(
    "gelu",
    "Elementwise t * P(X <= t) for a standard normal X, by the approximation with tanh.\n\n"
    "Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.",
    lambda dy, y, t: gelu_grad(dy, t),
    flops=2 * TRANSCENDENTAL,
)
gelu_ = inplace(gelu, "t")
geluerf = unary(
    "geluerf",
    "Elementwise t * P(X <= t) for a standard normal X, exact (by erf).",
    lambda dy, y, t: geluerf_grad(dy, t),
    flops=2 * TRANSCENDENTAL,
)
geluerf_ = inplace(geluerf, "t")
swish = unary(
    "swish", "Elementwise t * sigmoid(t).", lambda dy, y, t: swish_grad(dy, t), flops=TRANSCENDENTAL
)
swish_ = inplace(swish, "t")
