"""Samples of 8-bit products with scales. Oracles know the types by their definition alone."""

import numpy as np
import popxl
from popxl.errors import DTypeError, ShapeError
from popxl.extensions import float8_e4m3fn, float8_e5m2

from .sample import Operand, Refusal, Sample

BITS = {float8_e4m3fn: (3, 7, 448.0), float8_e5m2: (2, 15, 57344.0)}
"""Bits of mantissa, bias of the exponent, and largest number, as Micikevicius et al. 2022
(arXiv:2209.05433), table 1, define the types.
"""
TYPES = tuple(BITS)


def scale_of(amax, data_type):
    """The largest power of two that leaves a magnitude within a type, by trying all."""
    fitting = [s for s in range(-63, 64) if amax * 2.0**s <= BITS[data_type][2]]
    return 2.0 ** max(fitting, default=-63)


def nearest(x, data_type):
    """The nearest numbers of a type, ties to the even mantissa."""
    mantissa, bias, largest = BITS[data_type]
    x = np.asarray(x, np.float64)
    exponent = np.maximum(np.frexp(np.abs(np.where(np.isfinite(x), x, 0)))[1] - 1, 1 - bias)
    spacing = 2.0 ** (exponent - mantissa)
    found = np.round(x / spacing) * spacing
    assert (np.abs(found) <= largest).all()
    return found


def rounded(t, amax, data_type):
    return nearest(t * scale_of(amax, data_type), data_type)


def product(lhs, rhs, lhs_amax, rhs_amax, output_type, types=(float8_e4m3fn, float8_e4m3fn)):
    scales = [scale_of(amax, of) for amax, of in zip((lhs_amax, rhs_amax), types)]
    return lhs @ rhs / scales[0] / scales[1]


def scalar(value):
    """An operand of one float32."""
    return np.array(value, np.float32)


def rounded_sample(t, amax, to, oracle=rounded):
    return Sample(
        "to_float8",
        operands=(t, scalar(amax)),
        attrs={"data_type": to},
        oracle=oracle,
        in_16_bits=False,  # the amax is float32
    )


def all_nan(t, amax, data_type):
    return np.full_like(t, np.nan)


def product_sample(left, right, lhs, rhs, to, amaxes=(3.0, 0.01), **more):
    def oracle(*operands, **attrs):
        return product(*operands, **attrs, types=(lhs, rhs))

    return Sample(
        "float8_matmul",
        operands=(Operand(left, lhs), Operand(right, rhs), *map(scalar, amaxes)),
        attrs={"output_type": to},
        oracle=oracle,
        in_16_bits=False,  # operands and result have types of their own
        **more,
    )


WIDE = np.array([-448, -3.3, -1e-9, 0, 1e-4, 0.7, 61, 432, 446, 447.9], np.float32)
"""Numbers of all sizes, ties among them."""
SAMPLES = [
    *(
        Sample("amax", operands=(t,), oracle=lambda t: np.abs(t).max(initial=0))
        for t in ((3, 4), (0, 4), (), Operand((5, 6), layout="transposed"))
    ),
    Sample("amax", operands=(np.array([-2.0, np.nan, 1.0], np.float32),), oracle=np.max),
    Sample("amax", operands=(np.array([-np.inf, 1.0], np.float32),), oracle=lambda t: -np.min(t)),
    *(
        rounded_sample(t, amax, to)
        for to in TYPES
        for t, amax in (
            ((3, 4), 2.0),
            (Operand((3, 4), low=-1.75, high=1.75, layout="transposed"), 1.75),
            (Operand((3, 4), low=-1.75, high=1.75, layout="strided"), 1.7500001),
            (Operand((3, 4), low=-1e-5, high=1e-5), 1e-5),
            (Operand((3, 4), popxl.bfloat16), 2.5),
            (Operand((3, 4), popxl.float16), 300.0),
            (WIDE, 57344.0),
            (WIDE, 448.0),
            (WIDE, 1e30),
            ((), 2.0),
        )
    ),
    rounded_sample(np.zeros((2, 3), np.float32), 0.0, TYPES[0]),
    # no scale makes these finite
    *(
        rounded_sample(np.array([1.0, amax, -amax], np.float32), amax, to, all_nan)
        for to in TYPES
        for amax in (np.inf, np.nan)
    ),
    *(
        product_sample((3, 4), (4, 5), lhs, rhs, to)
        for lhs, rhs in (TYPES[:1] * 2, TYPES, TYPES[::-1])
        for to in (popxl.float32, popxl.bfloat16, popxl.float16)
    ),
    product_sample((17, 40), (40, 33), *TYPES, popxl.float32, amaxes=(448.0, 1e-12)),
    product_sample((2, 4096), (4096, 3), *TYPES, popxl.float32),
    product_sample((0, 4), (4, 5), *TYPES, popxl.float32),
]

REFUSALS = [
    Refusal("amax", operands=(np.ones(3, np.int32),), error=DTypeError, says="got t int32"),
    Refusal(
        "to_float8",
        operands=((3,), scalar(1.0)),
        attrs={"data_type": popxl.float8_143},
        error=DTypeError,
        says="expected float8_e4m3fn or float8_e5m2",
    ),
    Refusal(
        "to_float8",
        operands=((3,), (1,)),
        attrs={"data_type": TYPES[0]},
        error=DTypeError,
        says="expected a float32 scalar",
    ),
    Refusal(
        "float8_matmul",
        operands=((3, 4), Operand((4, 5), TYPES[0]), scalar(1.0), scalar(1.0)),
        attrs={"output_type": popxl.float32},
        error=DTypeError,
        says="Make them with to_float8",
    ),
    Refusal(
        "float8_matmul",
        operands=(Operand((3, 4), TYPES[1]), Operand((4, 5), TYPES[1]), scalar(1.0), scalar(1.0)),
        attrs={"output_type": popxl.float32},
        error=DTypeError,
        says="expected one of them to be float8_e4m3fn",
    ),
    Refusal(
        "float8_matmul",
        operands=(Operand((3, 4), TYPES[0]), Operand((3, 4), TYPES[1]), scalar(1.0), scalar(1.0)),
        attrs={"output_type": popxl.float32},
        error=ShapeError,
        says=r"expected \[m, k\] and \[k, n\]",
    ),
    Refusal(
        "float8_matmul",
        operands=(Operand((3, 4), TYPES[0]), Operand((4, 5), TYPES[0]), scalar(1.0), scalar(1.0)),
        attrs={"output_type": TYPES[0]},
        error=DTypeError,
        says="got output_type",
    ),
]
