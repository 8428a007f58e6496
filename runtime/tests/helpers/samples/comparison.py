"""Samples of comparisons, logic and classification."""

import numpy as np
import popxl
from popxl.errors import DTypeError, ShapeError

from .sample import Operand, Refusal, Same, Sample

LEFT = np.array([[1.0, 2.0, -3.0], [0.5, 2.0, 4.0]])
RIGHT = np.array([1.0, -2.0, -3.0])
INTEGERS, OTHERS = np.array([-1, 0, 5, 7], np.int32), np.array([-1, 2, 3, 7], np.int32)
UNSIGNED, BOUND = np.array([2**32 - 1, 5, 0], np.uint32), np.array(5, np.uint32)
TRUTH, OTHER_TRUTH = np.array([True, False, True, False]), np.array([True, True, False, False])
SPECIAL = np.array([0.0, -1.5, np.inf, -np.inf, np.nan])
MATRIX = Operand((3, 4), layout="transposed")


def comparisons(name, fn):
    return [
        Sample(name, operands=(LEFT, RIGHT), oracle=fn),
        Sample(name, operands=(LEFT, Same(0)), oracle=fn),
        Sample(name, operands=(MATRIX, Operand((4,), layout="strided")), oracle=fn),
        Sample(name, operands=(INTEGERS, OTHERS), oracle=fn),
        Sample(name, operands=(UNSIGNED, BOUND), oracle=fn),
        Sample(
            name,
            operands=(np.array([2**64 - 1, 1, 2**63], np.uint64), np.array(2**63, np.uint64)),
            oracle=fn,
        ),
        Sample(name, operands=(SPECIAL, np.array(np.nan)), oracle=fn),
    ]


def logic(name, fn):
    return [
        Sample(name, operands=(TRUTH, OTHER_TRUTH), oracle=fn),
        Sample(name, operands=(INTEGERS, OTHER_TRUTH), oracle=fn),
        Sample(name, operands=(np.array([[0.0], [2.0], [-0.5]]), np.array([1.0, 0.0])), oracle=fn),
        Sample(name, operands=(UNSIGNED, np.array([True])), oracle=fn),
        Sample(name, operands=(TRUTH, Same(0)), oracle=fn),
    ]


SAMPLES = [
    *comparisons("equal", np.equal),
    *comparisons("greater", np.greater),
    *logic("logical_and", np.logical_and),
    *logic("logical_or", np.logical_or),
    Sample("equal", operands=(TRUTH, OTHER_TRUTH), oracle=np.equal),
    Sample("logical_not", operands=(TRUTH,), oracle=np.logical_not),
    Sample("logical_not", operands=(INTEGERS,), oracle=np.logical_not),
    Sample("logical_not", operands=(UNSIGNED,), oracle=np.logical_not),
    Sample("logical_not", operands=(np.array([0.0, 0.3]),), oracle=np.logical_not),
    *(
        Sample(name, operands=(operand,), oracle=fn)
        for name, fn in (("isfinite", np.isfinite), ("isinf", np.isinf), ("isnan", np.isnan))
        for operand in (SPECIAL, MATRIX)
    ),
]

REFUSALS = [
    Refusal(
        "greater",
        operands=((3,), (3,)),
        dtype=popxl.complex64,
        error=DTypeError,
        says="expected real numbers",
    ),
    *(
        refusal
        for name in ("equal", "greater")
        for refusal in (
            Refusal(
                name, operands=((3,), (4,)), error=ShapeError, says="expected shapes that broadcast"
            ),
            Refusal(
                name, operands=((3,), INTEGERS[:3]), error=DTypeError, says="expected equal dtypes"
            ),
        )
    ),
    Refusal(
        "logical_and",
        operands=((3,), (4,)),
        error=ShapeError,
        says="expected shapes that broadcast",
    ),
    Refusal(
        "logical_or", operands=((3,), (4,)), error=ShapeError, says="expected shapes that broadcast"
    ),
    Refusal("logical_not", attrs={"t": True}, error=TypeError, says="expected a popxl.Tensor"),
    Refusal(
        "isnan",
        operands=(Operand((3,), dtype=popxl.int32),),
        error=DTypeError,
        says="expected floating point",
    ),
    Refusal(
        "isinf",
        operands=(Operand((3,), dtype=popxl.int32),),
        error=DTypeError,
        says="expected floating point",
    ),
    Refusal(
        "isfinite",
        operands=(Operand((3,), dtype=popxl.bool),),
        error=DTypeError,
        says="expected floating point",
    ),
]
