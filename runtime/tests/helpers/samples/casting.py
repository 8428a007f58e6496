"""Samples of conversions between element types."""

import numpy as np
import popxl
import torch
from popxl.errors import DTypeError, ShapeError

from .sample import Operand, Refusal, Sample

NUMBERS = np.array([-2.7, -0.4, 0.0, 1.5, 300.4], np.float32)


def rounded(t, data_type):
    """The values, to the target type and back, by torch."""
    return t.to(data_type.as_torch()).to(torch.float64)


LARGEST = {popxl.float8_143: 240, popxl.float8_152: 57344}
FLOAT8 = tuple(LARGEST)
WIDE = np.array(
    [-np.inf, -1e30, -241, -3.3, -1e-9, 0, 1e-4, 0.7, 61, 60000, np.inf, np.nan], np.float32
)


def scaled(t, log2_scale, data_type):
    """Scaled, and clipped to what a float8 type holds. The harness rounds it to that type, by
    torch.
    """
    largest = LARGEST.get(data_type, np.inf)
    return np.clip(t * 2.0**log2_scale, -largest, largest)


def scale(value):
    """A log2_scale operand."""
    return np.array(value, np.int32)


SAMPLES = [
    Sample(
        "cast",
        operands=((3, 4),),
        attrs={"data_type": popxl.float64},
        autograd=lambda t, data_type: t.double(),
    ),
    # The gradient is the identity; differences of float32 results would see its rounding.
    Sample(
        "cast",
        operands=((3, 4),),
        attrs={"data_type": popxl.float32},
        oracle=lambda t, data_type: t,
        grads=None,
    ),
    Sample(
        "cast",
        operands=(NUMBERS,),
        attrs={"data_type": popxl.float16},
        autograd=rounded,
        grads=None,
    ),
    Sample(
        "cast",
        operands=(NUMBERS,),
        attrs={"data_type": popxl.bfloat16},
        autograd=rounded,
        grads=None,
    ),
    Sample(
        "cast",
        operands=(NUMBERS,),
        attrs={"data_type": popxl.int32},
        oracle=lambda t, data_type: np.trunc(t),
        grads=None,
    ),
    Sample(
        "cast",
        operands=(Operand((2, 3), layout="transposed"),),
        attrs={"data_type": popxl.float16},
        autograd=rounded,
        grads=None,
    ),
    Sample(
        "cast",
        operands=(np.array([0, 3, 7], np.int32),),
        attrs={"data_type": popxl.uint32},
        oracle=lambda t, data_type: t.astype(np.uint32),
        grads=None,
    ),
    Sample(
        "cast",
        operands=(np.array([0, 3, 7], np.uint32),),
        attrs={"data_type": popxl.float32},
        oracle=lambda t, data_type: t.astype(np.float64),
        grads=None,
    ),
    Sample(
        "cast",
        operands=(np.array([0, 3, 7], np.uint32),),
        attrs={"data_type": popxl.int64},
        oracle=lambda t, data_type: t.astype(np.int64),
        grads=None,
    ),
    Sample(
        "cast",
        operands=(np.array([True, False]),),
        attrs={"data_type": popxl.int32},
        oracle=lambda t, data_type: np.array([1, 0], np.int32),
        grads=None,
    ),
    *(
        Sample(
            "pow2scale_cast_to_fp8", operands=(t, scale(by)), attrs={"data_type": to}, oracle=scaled
        )
        for to in FLOAT8
        for t, by in (
            ((3, 4), 3),
            ((3, 4), -8),
            (Operand((3, 4), layout="transposed"), 0),
            (WIDE, 5),
            (WIDE, -3),
        )
    ),
    Sample(
        "pow2scale_cast_to_fp8",
        operands=((), scale(1)),
        attrs={"data_type": FLOAT8[0]},
        oracle=scaled,
    ),
    *(
        Sample(
            "pow2scale_cast_from_fp8",
            operands=(t, scale(by)),
            attrs={"data_type": to},
            oracle=scaled,
            dtype=of,
        )
        for of in FLOAT8
        for to in (popxl.float32, popxl.float16, popxl.bfloat16)
        for t, by in (((3, 4), 3), ((3, 4), -32), (Operand((3, 4), layout="strided"), 31))
    ),
]

REFUSALS = [
    Refusal(
        "cast",
        operands=((3,),),
        attrs={"data_type": popxl.float32},
        dtype=popxl.complex64,
        error=DTypeError,
        says="expected a complex type",
    ),
    Refusal(
        "cast",
        operands=((3,),),
        attrs={"data_type": popxl.float8_143},
        error=DTypeError,
        says="pow2scale_cast",
    ),
    *(
        Refusal(op, operands=(t, by), attrs={"data_type": to}, error=error, says=says)
        for op, t, good, bad in (
            ("pow2scale_cast_to_fp8", Operand((3,)), popxl.float8_143, popxl.float16),
            (
                "pow2scale_cast_from_fp8",
                Operand((3,), dtype=popxl.float8_152),
                popxl.float16,
                popxl.float64,
            ),
        )
        for by, to, error, says in (
            (scale(1), bad, DTypeError, "got data_type"),
            (Operand((), dtype=popxl.float32), good, DTypeError, "got log2_scale.*expected int32"),
            (scale([1]), good, ShapeError, "expected a scalar"),
        )
    ),
    Refusal(
        "pow2scale_cast_to_fp8",
        operands=(Operand((3,), dtype=popxl.float64), scale(1)),
        attrs={"data_type": popxl.float8_143},
        error=DTypeError,
        says="expected float16, bfloat16 or float32",
    ),
    Refusal(
        "pow2scale_cast_from_fp8",
        operands=((3,), scale(1)),
        attrs={"data_type": popxl.float16},
        error=DTypeError,
        says="expected float8_143 or float8_152",
    ),
]
