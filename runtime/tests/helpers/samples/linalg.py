"""Samples of matrix products."""

import numpy as np
import popxl
import torch
from popxl.errors import DTypeError, ShapeError

from .sample import Operand, Refusal, Same, Sample


def accumulated(lhs, rhs, output_type):
    return np.matmul(lhs, rhs)


SHAPES = [
    ((3, 4), (4, 5)),
    ((2, 3, 4), (4, 5)),
    ((2, 3, 4), (2, 4, 5)),
    ((2, 1, 3, 4), (5, 4, 2)),
    ((3, 4), (2, 4, 5)),
    ((4,), (4, 5)),
    ((3, 4), (4,)),
    ((4,), (4,)),
    ((2, 3, 4), (4,)),
    ((4,), (2, 4, 3)),
    ((1, 1, 3, 4), (4, 2)),
]

FLOAT8 = (popxl.float8_143, popxl.float8_152)


def scaled_product(lhs, rhs, log2_scale):
    return np.matmul(lhs, rhs) * 2.0**log2_scale


def float8_sample(left, right, log2_scale, lhs=FLOAT8[0], rhs=FLOAT8[0]):
    """Exact sums of exact products: the result is rounded once."""
    return Sample(
        "matmul_pow2scaled",
        operands=(Operand(left, lhs), Operand(right, rhs), np.array(log2_scale, np.int32)),
        oracle=scaled_product,
        in_16_bits=False,  # operands and result have types of their own
        rtol=0,
        atol=0,
    )


SAMPLES = [
    *(
        Sample("matmul", operands=shapes, autograd=torch.matmul, oracle=np.matmul)
        for shapes in SHAPES
    ),
    *(
        Sample("matmul", operands=shapes, autograd=torch.matmul, dtype=popxl.float64)
        for shapes in SHAPES[:3]
    ),
    *(
        Sample(
            "matmul",
            operands=(Operand((2, 3, 4), layout=left), Operand((4, 5), layout=right)),
            autograd=torch.matmul,
        )
        for left, right in (
            ("transposed", "contiguous"),
            ("contiguous", "transposed"),
            ("strided", "strided"),
            ("expanded", "expanded"),
        )
    ),
    Sample("matmul", operands=((3, 3), Same(0)), autograd=torch.matmul),
    Sample("matmul", operands=((2, 3, 3), Same(0)), autograd=torch.matmul),
    Sample("matmul", operands=((0, 4), (4, 5)), autograd=torch.matmul),
    Sample(
        "matmul",
        operands=((3, 4), (4, 5)),
        attrs={"available_memory_proportion": 0.3, "partials_type": popxl.float32},
        oracle=lambda lhs, rhs, **options: np.matmul(lhs, rhs),
    ),
    # 4096 terms of about one: a product accumulated in 16 bits would stop growing at 256 or 2048.
    Sample(
        "matmul",
        operands=(Operand((2, 4096), low=0.5, high=1.5), Operand((4096, 3), low=0.5, high=1.5)),
        oracle=np.matmul,
        grads=None,
    ),
    Sample(
        "matmul",
        operands=((3, 4), (4, 5)),
        attrs={"output_type": popxl.float32},
        oracle=accumulated,
        dtype=popxl.float16,
        grads=None,
        rtol=1e-6,
        atol=1e-6,
    ),
    Sample(
        "matmul",
        operands=((3, 4), (4, 5)),
        attrs={"output_type": popxl.float32},
        oracle=accumulated,
        dtype=popxl.bfloat16,
        grads=None,
        rtol=1e-6,
        atol=1e-6,
    ),
    Sample(
        "matmul",
        operands=(
            np.arange(6, dtype=np.int32).reshape(2, 3),
            np.arange(12, dtype=np.int32).reshape(3, 4),
        ),
        oracle=np.matmul,
    ),
    Sample(
        "matmul",
        operands=(np.array([[2**31, 1]], np.uint32), np.array([[3], [5]], np.uint32)),
        oracle=np.matmul,
    ),
    *(float8_sample(left, right, -2) for left, right in SHAPES),
    *(
        float8_sample((3, 4), (4, 5), by, lhs, rhs)
        for lhs in FLOAT8
        for rhs in FLOAT8
        for by in (-5, 0, 9)
    ),
    float8_sample((2, 4096), (4096, 3), 1),
    float8_sample((0, 4), (4, 5), 0),
]

REFUSALS = [
    Refusal("matmul", operands=((3, 4), (3, 4)), error=ShapeError, says="second-to-last"),
    Refusal(
        "matmul",
        operands=((2, 3, 4), (3, 4, 5)),
        error=ShapeError,
        says="leading axes that broadcast",
    ),
    Refusal("matmul", operands=((), (3, 4)), error=ShapeError, says="at least one axis each"),
    Refusal(
        "matmul",
        operands=((3, 4), Operand((4, 5), dtype=popxl.int32)),
        error=DTypeError,
        says="expected equal dtypes",
    ),
    Refusal(
        "matmul",
        operands=((3, 4), (4, 5)),
        attrs={"partials_type": popxl.int8},
        error=ValueError,
        says="expected float16 or float32",
    ),
    Refusal(
        "matmul",
        operands=((3, 4), (4, 5)),
        attrs={"output_type": popxl.int32},
        error=DTypeError,
        says="of the same kind",
    ),
    Refusal(
        "matmul_pow2scaled",
        operands=(
            Operand((3, 4), FLOAT8[0]),
            Operand((4, 5), popxl.float16),
            np.array(0, np.int32),
        ),
        error=DTypeError,
        says="got rhs.*expected float8_143 or float8_152",
    ),
    Refusal(
        "matmul_pow2scaled",
        operands=(Operand((3, 4), FLOAT8[0]), Operand((4, 5), FLOAT8[0]), np.array(0, np.int64)),
        error=DTypeError,
        says="got log2_scale.*expected int32",
    ),
    Refusal(
        "matmul_pow2scaled",
        operands=(Operand((3, 4), FLOAT8[0]), Operand((4, 5), FLOAT8[0]), np.array([0], np.int32)),
        error=ShapeError,
        says="expected a scalar",
    ),
    Refusal(
        "matmul_pow2scaled",
        operands=(Operand((3, 4), FLOAT8[0]), Operand((3, 4), FLOAT8[1]), np.array(0, np.int32)),
        error=ShapeError,
        says="second-to-last",
    ),
]
