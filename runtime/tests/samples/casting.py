"""Samples of conversions between element types."""

import numpy as np
import popxl
import torch
from popxl.errors import DTypeError

from .sample import Operand, Refusal, Sample

NUMBERS = np.array([-2.7, -0.4, 0.0, 1.5, 300.4], np.float32)


def rounded(t, data_type):
    """To the target type and back, by torch."""
    return t.to(data_type.as_torch()).to(torch.float64)


SAMPLES = [
    Sample("cast", operands=((3, 4),), attrs={"data_type": popxl.float64}, autograd=lambda t, data_type: t.double()),
    # The gradient is the identity; differences of float32 results would see its rounding.
    Sample("cast", operands=((3, 4),), attrs={"data_type": popxl.float32}, oracle=lambda t, data_type: t, grads=None),
    Sample("cast", operands=(NUMBERS,), attrs={"data_type": popxl.float16}, autograd=rounded, grads=None),
    Sample("cast", operands=(NUMBERS,), attrs={"data_type": popxl.bfloat16}, autograd=rounded, grads=None),
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
]

REFUSALS = [
    Refusal("cast", operands=((3,),), attrs={"data_type": popxl.float8_143}, error=DTypeError, says="pow2scale_cast")
]
