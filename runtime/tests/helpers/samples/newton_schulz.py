"""Samples of Newton-Schulz iterations."""

import numpy as np
import popxl
from popxl.errors import DTypeError, ShapeError

from .sample import Operand, Refusal, Sample


def iterated(t, coefficients=(3.4445, -4.7750, 2.0315), steps=5, eps=1e-7):
    """The singular values through the polynomial, one by one; the vectors stay."""
    u, s, vt = np.linalg.svd(t, full_matrices=False)
    first, third, fifth = coefficients
    s = s / (np.sqrt((s**2).sum(-1, keepdims=True)) + eps)
    for _ in range(steps):
        s = first * s + third * s**3 + fifth * s**5
    return (u * s[..., None, :]) @ vt


def sample(shape, **more):
    return Sample("newton_schulz", operands=(shape,), oracle=iterated, **more)


# Without 16 bits: each step multiplies small singular values, and what rounding adds to them, by 3.4.
SAMPLES = [
    *(sample(s, in_16_bits=False) for s in [(3, 4), (6, 4), (2, 3, 9), (2, 2, 12, 5), (1, 3)]),
    *(sample(s, in_16_bits=False) for s in [(3, 1), (0, 4), (0, 3, 4), (1, 390, 400), (390, 800)]),
    sample(Operand((5, 6), layout="transposed"), in_16_bits=False),
    sample((4, 6), dtype=popxl.float64),
    sample((2, 4, 6), attrs={"steps": 1}),
    sample((4, 9), attrs={"coefficients": (1.5, -0.5, 0.0), "steps": 1, "eps": 0.5}),
]

REFUSALS = [
    Refusal("newton_schulz", operands=((4,),), error=ShapeError, says="at least two axes"),
    Refusal(
        "newton_schulz", operands=((3, 4),), attrs={"steps": 0}, error=ValueError, says="0 steps"
    ),
    Refusal(
        "newton_schulz",
        operands=(np.ones((2, 2), np.int32),),
        error=DTypeError,
        says="floating point",
    ),
]
