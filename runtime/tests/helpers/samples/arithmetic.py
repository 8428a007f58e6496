"""Samples of elementwise arithmetic."""

import numpy as np
import popxl
import torch
from popxl.errors import DTypeError, GraphError, ShapeError

from .sample import Built, Operand, Refusal, Same, Sample

A, ROW, COLUMN = (3, 4), (4,), (3, 1)
POSITIVE = Operand(A, low=0.5, high=3.0)
TRANSPOSED, STRIDED, EXPANDED = (
    Operand(A, layout=layout) for layout in ("transposed", "strided", "expanded")
)
SIGNED = np.array([-7, -3, 0, 4, 9], np.int32)
DIVISORS = np.array([2, -2, 5, -3, 4], np.int32)
WRAPPING = np.array([2**32 - 1, 2**31, 7], np.uint32)


LOWEST = np.array([-(2**31), -(2**31), -(2**31), 2**31 - 1], np.int32)
ODD = np.array([3, -1, 2**31 - 1, -1], np.int32)


def truncated(lhs, rhs):
    """The quotient without a limit on the size of numbers."""
    exact = [
        abs(int(a)) // abs(int(b)) * (1 if (a < 0) == (b < 0) else -1) for a, b in zip(lhs, rhs)
    ]
    return np.array(exact, np.int64).astype(lhs.dtype)


def binary(name, fn, divisor=False):
    """Samples of every way in which two operands meet. Divisors keep away from zero."""
    rhs = {"low": 0.5, "high": 3.0} if divisor else {}
    return [
        Sample(name, operands=(A, Operand(A, **rhs)), autograd=fn),
        Sample(name, operands=(A, Operand(ROW, **rhs)), autograd=fn),
        Sample(name, operands=(Operand((2, 1, 4)), Operand(COLUMN, **rhs)), autograd=fn),
        Sample(name, operands=(Operand((), low=0.6), Operand(A, **rhs)), autograd=fn),
        Sample(name, operands=(TRANSPOSED, Operand(A, layout="strided", **rhs)), autograd=fn),
        Sample(name, operands=(EXPANDED, Operand(A, layout="expanded", **rhs)), autograd=fn),
        Sample(name, operands=(A, Operand(A, **rhs)), autograd=fn, dtype=popxl.float64),
        Sample(name, operands=((0, 4), Operand(ROW, **rhs)), autograd=fn),
    ]


SAMPLES = [
    *binary("add", torch.add),
    *binary("sub", torch.sub),
    *binary("mul", torch.mul),
    *binary("div", torch.div, divisor=True),
    Sample("add", operands=(A, Same(0)), autograd=torch.add),
    Sample("sub", operands=(A, Same(0)), autograd=torch.sub),
    Sample("mul", operands=(A, Same(0)), autograd=torch.mul),
    Sample("div", operands=(POSITIVE, Same(0)), autograd=torch.div),
    Sample("add", operands=(SIGNED, DIVISORS), oracle=np.add),
    Sample("add", operands=(WRAPPING, np.array(2, np.uint32)), oracle=np.add),
    Sample("sub", operands=(WRAPPING, np.array([1, 2**31 + 1, 8], np.uint32)), oracle=np.subtract),
    Sample("mul", operands=(WRAPPING, np.array(3, np.uint32)), oracle=np.multiply),
    Sample("div", operands=(SIGNED, DIVISORS), oracle=truncated),
    Sample("div", operands=(LOWEST, ODD), oracle=truncated),
    Sample(
        "div", operands=(WRAPPING, np.array([3, 2**31, 2**32 - 1], np.uint32)), oracle=truncated
    ),
    Sample("add_", operands=(A, ROW), oracle=np.add),
    Sample("add_", operands=(TRANSPOSED, A), oracle=np.add),
    Sample("add_", operands=(STRIDED, COLUMN), oracle=np.add),
    Sample("add_", operands=(WRAPPING, np.array(2, np.uint32)), oracle=np.add),
    # The quotients stay away from integers, where the remainder jumps, also after 16-bit rounding.
    Sample(
        "fmod",
        operands=(np.array([3.3, -3.3, 1.2, -5.4]), np.array([2.0, 2.0, -0.7, -1.6])),
        autograd=torch.fmod,
    ),
    Sample(
        "fmod",
        operands=(np.array([[3.3], [-3.3]]), np.array([2.0, -0.9, 1.4])),
        autograd=torch.fmod,
    ),
    Sample("fmod", operands=(SIGNED, DIVISORS), oracle=np.fmod),
    Sample("fmod", operands=(LOWEST, ODD), oracle=np.fmod),
    Sample("negate", operands=(A,), autograd=torch.neg),
    Sample("negate", operands=(TRANSPOSED,), autograd=torch.neg),
    Sample("negate", operands=(SIGNED,), oracle=np.negative),
    Sample("abs", operands=(Operand(A, away_from=(0.0,)),), autograd=torch.abs),
    Sample("abs", operands=(SIGNED,), oracle=np.abs),
    Sample("sign", operands=(Operand(A, away_from=(0.0,)),), autograd=torch.sign),
    Sample("sign", operands=(SIGNED,), oracle=np.sign),
    Sample("pow", operands=(POSITIVE,), attrs={"e": 2.5}, autograd=lambda t, e: t**e),
    Sample("pow", operands=(A,), attrs={"e": 2}, autograd=lambda t, e: t**e),
    Sample("pow", operands=(A,), attrs={"e": 3.0}, autograd=lambda t, e: t**e),
    Sample("pow", operands=(POSITIVE, Operand(A)), autograd=torch.pow),
    Sample("pow", operands=(Operand(COLUMN, low=0.5), Operand(ROW)), autograd=torch.pow),
    Sample("pow", operands=(POSITIVE, Same(0)), autograd=torch.pow),
    Sample(
        "pow",
        operands=(POSITIVE,),
        attrs={"e": np.array([1.0, 2.0, 0.5, -1.0])},
        autograd=lambda t, e: t ** torch.tensor(e),
    ),
    Sample(
        "pow", operands=(np.array([2, -3], np.int32), np.array([3, 2], np.int32)), oracle=np.power
    ),
    Sample("pow", operands=(np.array([0.0, 2.0]),), attrs={"e": 0.0}, autograd=lambda t, e: t**e),
    Sample("pow", operands=(np.array([0.0, 2.0]),), attrs={"e": 1.0}, autograd=lambda t, e: t**e),
    # At a base of zero the derivative for the exponent is taken as zero, as torch does; differences
    # there do not exist.
    Sample(
        "pow", operands=(np.array([0.0, 2.0]), np.array([2.0, 3.0])), autograd=torch.pow, grads=None
    ),
    Sample(
        "pow_grad",
        operands=(A, POSITIVE, A, A),
        oracle=lambda dy, t, e, y: [dy * e * t ** (e - 1), dy * y * np.log(t)],
    ),
    Sample("maximum", operands=(Operand(A, distinct=True),), autograd=lambda t: t),
    Sample(
        "maximum",
        operands=(Operand((5,), distinct=True), np.array([0.31, -1.53, 2.2, -2.0, 1.0])),
        autograd=torch.maximum,
    ),
    Sample(
        "maximum",
        operands=(np.array([[0.1], [-1.0]]), np.array([0.5, -2.0, -0.7]), np.array(0.3)),
        autograd=lambda a, b, c: torch.maximum(torch.maximum(a, b), c),
    ),
    Sample("maximum", operands=(A, Same(0)), autograd=torch.maximum),
    Sample("maximum", operands=(SIGNED, DIVISORS), oracle=np.maximum),
    Sample("maximum", operands=(WRAPPING, np.array(9, np.uint32)), oracle=np.maximum),
    Sample(
        "maximum_grad",
        operands=(
            ROW,
            np.array([1.0, 2.0, 3.0, 4.0]),
            [np.array([1.0, 0.0, 3.0, 0.0]), np.array([0.0, 2.0, 3.0, 4.0])],
        ),
        oracle=lambda dy, y, ts: [dy * [1, 0, 0.5, 0], dy * [0, 1, 0.5, 1]],
    ),
    Sample("scale", operands=(A,), attrs={"factor": 1 / 3}, autograd=lambda t, factor: t * factor),
    Sample(
        "clip",
        operands=(Operand(A, away_from=(-0.5, 1.0)),),
        attrs={"min": -0.5, "max": 1.0},
        autograd=torch.clip,
    ),
    Sample(
        "clip", operands=(Operand(A, away_from=(0.25,)),), attrs={"max": 0.25}, autograd=torch.clip
    ),
    Sample("clip", operands=(A,), autograd=lambda t: t),
    # bounds that narrow integers do not have
    Sample("clip", operands=(A,), attrs={"min": -300, "max": 7e4}, autograd=torch.clip),
    Sample("clip", operands=(A,), attrs={"min": -1e40, "max": 1e40}, autograd=torch.clip),
    # bounds inward that no type narrower than float64 has
    Sample(
        "clip",
        operands=(A,),
        attrs={"min": 1e40},
        oracle=lambda t, min: np.full(t.shape, np.inf),
    ),
    Sample(
        "clip",
        operands=(A,),
        attrs={"max": -1e40},
        oracle=lambda t, max: np.full(t.shape, -np.inf),
    ),
    Sample(
        "clip",
        operands=(np.array([2**24 + 1, 2**31 - 1, -(2**24) - 1], np.int32),),
        attrs={"min": 0.0},
        oracle=lambda t, min: np.maximum(t, 0),
    ),
    Sample(
        "clip",
        operands=(np.array([2**24 + 1, 2**32 - 1, 3], np.uint32),),
        attrs={"min": 4.5, "max": 4e9},
        oracle=lambda t, min, max: np.array([2**24 + 1, 4 * 10**9, 5]),
    ),
    Sample(
        "clip",
        operands=(np.array([1, 250], np.uint8),),
        attrs={"min": -3, "max": 300},
        oracle=lambda t, min, max: t,
    ),
    Sample(
        "clip",
        operands=(SIGNED,),
        attrs={"min": -4, "max": 5},
        oracle=lambda t, min, max: np.clip(t, min, max),
    ),
    Sample(
        "clip_grad",
        operands=(A, A),
        attrs={"min": -0.5, "max": 1.0},
        oracle=lambda dy, t, min, max: np.where((t >= min) & (t <= max), dy, 0),
    ),
    Sample(
        "increment_mod",
        operands=(np.array([0.2, 1.3, 2.6, -0.4]),),
        attrs={"increment": 1.0, "modulus": 3.0},
        autograd=lambda t, increment, modulus: torch.fmod(t + increment, modulus),
    ),
    Sample(
        "increment_mod",
        operands=(np.array([255, 254], np.uint8),),
        attrs={"increment": 3, "modulus": 7},
        oracle=lambda t, increment, modulus: np.array([6, 5], np.uint8),
    ),
    Sample(
        "increment_mod",
        operands=(np.array([2**31 - 1, -(2**31)], np.int32),),
        attrs={"increment": 1, "modulus": 7},
        oracle=lambda t, increment, modulus: np.array([2, -1], np.int32),
    ),
    Sample(
        "increment_mod",
        operands=(np.array([0, 1, 2], np.uint32),),
        attrs={"increment": 1, "modulus": 3},
        oracle=lambda t, increment, modulus: np.array([1, 2, 0], np.uint32),
    ),
    Sample(
        "increment_mod_",
        operands=(np.array([5, 6, -9], np.int32),),
        attrs={"increment": 2, "modulus": 8},
        oracle=lambda t, increment, modulus: np.array([7, 0, -7], np.int32),
    ),
    Sample("scaled_add", operands=(A, A), autograd=torch.add),
    Sample(
        "scaled_add",
        operands=(A, A),
        attrs={"a": 0.3, "b": -1.7},
        autograd=lambda X, Y, a, b: a * X + b * Y,
    ),
    Sample("scaled_add", operands=(A, A, (), (1,)), autograd=lambda X, Y, a, b: a * X + b * Y),
    Sample(
        "scaled_add", operands=(A, Same(0)), attrs={"a": 2.0}, autograd=lambda X, Y, a: a * X + Y
    ),
    # Whole numbers beyond 2**53, which float64 does not hold.
    Sample(
        "scaled_add",
        operands=(np.array([2**60 + 1, 3]), np.array([1, 2**55 + 1])),
        attrs={"a": 2, "b": -1},
        oracle=lambda X, Y, a, b: int(a) * X + int(b) * Y,
        dtype=popxl.int64,
    ),
    Sample(
        "scaled_add",
        operands=(SIGNED, DIVISORS),
        attrs={"a": 2, "b": 3},
        oracle=lambda X, Y, a, b: a * X + b * Y,
    ),
    Sample(
        "scaled_add_",
        operands=(A, A),
        attrs={"a": 0.3, "b": -1.7},
        oracle=lambda X, Y, a, b: a * X + b * Y,
    ),
    Sample("scaled_add_", operands=(A, A), attrs={"b": -0.01}, oracle=lambda X, Y, b: X + b * Y),
    Sample("scaled_add_", operands=(A, A, (), (1,)), oracle=lambda X, Y, a, b: a * X + b * Y),
    Sample(
        "scaled_add_",
        operands=(A, Operand(A, dtype=popxl.float16)),
        attrs={"b": 0.5},
        oracle=lambda X, Y, b: X + b * Y,
    ),
    Sample(
        "scaled_add_",
        operands=(A, Operand(A, dtype=popxl.float32)),
        attrs={"b": 0.5},
        oracle=lambda X, Y, b: X + b * Y,
        dtype=popxl.bfloat16,
    ),
    Sample("scaled_add_", operands=(TRANSPOSED, STRIDED), oracle=np.add),
    Sample(
        "scaled_add_",
        operands=(A, Same(0)),
        attrs={"a": 0.5, "b": 2.0},
        oracle=lambda X, Y, a, b: 2.5 * X,
    ),
    Sample(
        "scaled_add_",
        operands=(A, Same(0), np.array(0.5), np.array(2.0)),
        oracle=lambda X, Y, a, b: 2.5 * X,
    ),
    Sample("add_", operands=(A, Same(0)), oracle=np.add),
]


def from_another_graph():
    """A tensor that does not belong to the graph which is being built."""
    graph = popxl.get_ir().create_empty_graph("other")
    with graph:
        return popxl.graph_input((3,), popxl.float32, "w")


def mixed(other):
    return Operand((3,), dtype=other)


REFUSALS = [
    *(
        Refusal(
            name,
            operands=((3,),) * count,
            attrs=attrs,
            dtype=popxl.complex64,
            error=DTypeError,
            says="real numbers",
        )
        for name, count, attrs in (
            ("abs", 1, {}),
            ("sign", 1, {}),
            ("clip", 1, {"min": 0.0}),
            ("increment_mod", 1, {"increment": 1.0, "modulus": 3.0}),
            ("fmod", 2, {}),
            ("maximum", 2, {}),
            ("scaled_add", 2, {}),
            ("scaled_add_", 2, {}),
        )
    ),
    *(
        refusal
        for name in ("add", "sub", "mul", "div", "fmod", "add_")
        for refusal in (
            Refusal(
                name,
                operands=((3, 4), (3,)),
                error=ShapeError,
                says="expected shapes that broadcast",
            ),
            Refusal(
                name,
                operands=((3,), mixed(popxl.float16)),
                error=DTypeError,
                says="expected equal dtypes",
            ),
            Refusal(
                name,
                operands=(mixed(popxl.bool), mixed(popxl.bool)),
                error=DTypeError,
                says="expected numbers",
            ),
        )
    ),
    Refusal(
        "add", operands=((3,),), attrs={"rhs": 1.0}, error=TypeError, says="expected a popxl.Tensor"
    ),
    Refusal(
        "add",
        operands=((3,),),
        attrs={"rhs": Built(from_another_graph)},
        error=GraphError,
        says="Pass it in as a graph input",
    ),
    Refusal("add_", operands=((3,), (2, 3)), error=ShapeError, says="written in place"),
    Refusal("negate", operands=(mixed(popxl.bool),), error=DTypeError, says="expected numbers"),
    Refusal(
        "pow", operands=((3, 4), (3,)), error=ShapeError, says="expected shapes that broadcast"
    ),
    Refusal(
        "pow", operands=((3,), mixed(popxl.float16)), error=DTypeError, says="expected equal dtypes"
    ),
    Refusal("maximum", error=ShapeError, says="got no tensors"),
    Refusal(
        "maximum",
        operands=((3, 4), (4,), (3,)),
        error=ShapeError,
        says=r"ts\[2\] float32\[3\]; expected shapes that broadcast",
    ),
    Refusal(
        "scale",
        operands=(SIGNED,),
        attrs={"factor": 2.0},
        error=DTypeError,
        says="expected floating point",
    ),
    Refusal(
        "clip",
        operands=((3,),),
        attrs={"min": 1.0, "max": 0.0},
        error=ShapeError,
        says="expected min <= max",
    ),
    Refusal(
        "clip",
        operands=((3,),),
        attrs={"min": float("nan")},
        error=ShapeError,
        says="expected min <= max",
    ),
    Refusal(
        "increment_mod",
        operands=(SIGNED,),
        attrs={"increment": 1, "modulus": 0.5},
        error=ValueError,
        says="expected an integer other than 0",
    ),
    Refusal(
        "scaled_add",
        operands=((3,), mixed(popxl.int32)),
        error=DTypeError,
        says="expected equal dtypes",
    ),
    Refusal("scaled_add", operands=((3,), (1, 3)), error=ShapeError, says="expected equal shapes"),
    Refusal(
        "scaled_add", operands=((3,), (3,), (2,)), error=ShapeError, says="a tensor of one element"
    ),
    Refusal("scaled_add_", operands=((3,), (4,)), error=ShapeError, says="expected equal shapes"),
    Refusal(
        "scaled_add_",
        operands=((3,), (3,)),
        attrs={"b": "half"},
        error=DTypeError,
        says="expected a number",
    ),
]
