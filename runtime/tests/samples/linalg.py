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

SAMPLES = [
    *(Sample("matmul", operands=shapes, autograd=torch.matmul, oracle=np.matmul) for shapes in SHAPES),
    *(Sample("matmul", operands=shapes, autograd=torch.matmul, dtype=popxl.float64) for shapes in SHAPES[:3]),
    *(
        Sample(
            "matmul", operands=(Operand((2, 3, 4), layout=left), Operand((4, 5), layout=right)), autograd=torch.matmul
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
        operands=(np.arange(6, dtype=np.int32).reshape(2, 3), np.arange(12, dtype=np.int32).reshape(3, 4)),
        oracle=np.matmul,
    ),
    Sample("matmul", operands=(np.array([[2**31, 1]], np.uint32), np.array([[3], [5]], np.uint32)), oracle=np.matmul),
]

REFUSALS = [
    Refusal("matmul", operands=((3, 4), (3, 4)), error=ShapeError, says="second-to-last"),
    Refusal("matmul", operands=((2, 3, 4), (3, 4, 5)), error=ShapeError, says="leading axes that broadcast"),
    Refusal("matmul", operands=((), (3, 4)), error=ShapeError, says="at least one axis each"),
    Refusal(
        "matmul",
        operands=((3, 4), Operand((4, 5), dtype=popxl.float16)),
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
]
