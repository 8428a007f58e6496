"""Samples of AdamW with moments of 8 bits."""

import numpy as np
import popxl
from popxl.errors import DTypeError, ShapeError
from popxl.moments import FIRST, SECOND, coded_length

from .sample import Operand, Refusal, Sample

SHAPE, COUNT = (5, 9), 45
random = np.random.default_rng(3)
MOMENTS = {
    "first": FIRST.encode(random.normal(size=COUNT).astype(np.float32)),
    "second": SECOND.encode(random.random(COUNT).astype(np.float32)),
}
OPERANDS = {"var": SHAPE, "grad": SHAPE, **MOMENTS, "step": np.array(3.0)}
NUMBERS = {"lr": 0.1, "beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6, "weight_decay": 0.2}


def adamw(var, grad, first, second, step, condition=True, scale=1.0, **numbers):
    """The formula, from the numbers that the codes stand for."""
    if not np.all(condition):
        return var
    g, step = grad * scale, np.asarray(step).reshape(())
    m, v = (
        form.decode(coded, COUNT).astype(np.float64).reshape(SHAPE)
        for form, coded in ((FIRST, first), (SECOND, second))
    )
    m = numbers["beta1"] * m + (1 - numbers["beta1"]) * g
    v = numbers["beta2"] * v + (1 - numbers["beta2"]) * g**2
    root = np.sqrt(v / (1 - numbers["beta2"] ** step)) + numbers["epsilon"]
    update = m / (1 - numbers["beta1"] ** step) / root
    return var - numbers["lr"] * (update + numbers["weight_decay"] * var)


SAMPLES = [
    *(
        Sample("adamw_8bit_", operands={**OPERANDS, **others}, attrs=NUMBERS, oracle=adamw)
        for others in (
            {},
            {"scale": np.array(0.5), "condition": np.array([True])},
            {"condition": np.array(False)},
            {"var": Operand(SHAPE, layout="transposed"), "grad": Operand(SHAPE, layout="strided")},
            {"grad": Operand(SHAPE, dtype=popxl.bfloat16)},
        )
    ),
]
REFUSALS = [
    Refusal(
        "adamw_8bit_",
        operands={**OPERANDS, "grad": (45,)},
        attrs=NUMBERS,
        error=ShapeError,
        says="expected equal shapes",
    ),
    Refusal(
        "adamw_8bit_",
        operands={**OPERANDS, "second": np.zeros(45, np.uint8)},
        attrs=NUMBERS,
        error=ShapeError,
        says=rf"second uint8\[45\].*expected uint8\[{coded_length(45)}\]",
    ),
    Refusal(
        "adamw_8bit_",
        operands={**OPERANDS, "first": (coded_length(45),)},
        attrs=NUMBERS,
        error=DTypeError,
        says="expected uint8",
    ),
    Refusal(
        "adamw_8bit_",
        operands={**OPERANDS, "condition": ()},
        attrs=NUMBERS,
        error=DTypeError,
        says="expected a bool",
    ),
    Refusal(
        "adamw_8bit_",
        operands={**OPERANDS, "scale": (2,)},
        attrs=NUMBERS,
        error=ShapeError,
        says="one element",
    ),
    Refusal(
        "adamw_8bit_",
        operands={**OPERANDS, "var": Operand(SHAPE, dtype=popxl.int32)},
        attrs=NUMBERS,
        error=DTypeError,
        says="floating point",
    ),
]
