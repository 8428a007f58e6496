"""Samples of reductions and running sums."""

import numpy as np
import popxl
from popxl.errors import DTypeError, ShapeError

from .sample import Operand, Refusal, Sample

SHAPE = (2, 3, 4)
INTEGERS = np.array([[3, -1, 4], [1, 5, -9]], np.int32)
LARGE = np.array([[1, 2**64 - 1, 2**63], [7, 2**63 + 1, 2**62]], np.uint64)
UNSIGNED = np.array([[3, 1, 4], [1, 5, 2**32 - 1]], np.uint32)
ZEROS = np.array([[0.0, 2.0, -1.0], [0.0, 3.0, 0.0], [1.5, 2.0, 0.7]])
FORMS = (
    {},
    {"axis": 1},
    {"axis": -1, "keepdims": True},
    {"axis": [0, 2]},
    {"axis": (2, 0), "keepdims": True},
    {"keepdims": True},
)


def dims(t, axis):
    """The axes as torch wants them."""
    if axis is None:
        return tuple(range(t.dim()))
    return (axis,) if isinstance(axis, int) else tuple(axis)


def by_dims(fn):
    """An oracle from a torch function that takes several axes."""
    return lambda t, axis=None, keepdims=False: fn(t, dims(t, axis), keepdims)


def one_by_one(fn):
    """An oracle from a torch function of one axis, for reductions that may be done axis by axis."""

    def oracle(t, axis=None, keepdims=False):
        for d in sorted((d % t.dim() for d in dims(t, axis)), reverse=True):
            t = fn(t, d, keepdims)
        return t

    return oracle


def median(t, axis=None, keepdims=False):
    """The median along the reduced axes merged into one: the lower of the two in the middle, by
    sorting.
    """
    reduced = sorted(d % t.dim() for d in dims(t, axis))
    kept = [d for d in range(t.dim()) if d not in reduced]
    flat = t.permute(*kept, *reduced).flatten(len(kept)).sort(-1).values
    result = flat[..., (flat.shape[-1] - 1) // 2]
    return (
        result.reshape([1 if d in reduced else n for d, n in enumerate(t.shape)])
        if keepdims
        else result
    )


ORACLES = {
    "sum": (by_dims(lambda t, d, k: t.sum(d, k)), {}),
    "mean": (by_dims(lambda t, d, k: t.mean(d, k)), {}),
    "prod": (one_by_one(lambda t, d, k: t.prod(d, k)), {}),
    "max": (by_dims(lambda t, d, k: t.amax(d, k)), {"distinct": True}),
    "min": (by_dims(lambda t, d, k: t.amin(d, k)), {"distinct": True}),
    "l1": (by_dims(lambda t, d, k: t.abs().sum(d, k)), {"away_from": (0.0,)}),
    "l2": (by_dims(lambda t, d, k: t.square().sum(d, k).sqrt()), {}),
    "sumsquare": (by_dims(lambda t, d, k: t.square().sum(d, k)), {}),
    "logsum": (by_dims(lambda t, d, k: t.sum(d, k).log()), {"low": 0.3, "high": 2.0}),
    "logsumexp": (by_dims(lambda t, d, k: t.exp().sum(d, k).log()), {}),
    "median": (median, {"distinct": True}),
}


def samples_of(name, fn, values):
    found = [
        Sample(name, operands=(Operand(SHAPE, **values),), attrs=form, autograd=fn)
        for form in FORMS
    ]
    found += [
        Sample(
            name,
            operands=(Operand(SHAPE, layout=layout, **values),),
            attrs={"axis": [1, 2]},
            autograd=fn,
        )
        for layout in ("transposed", "strided")
    ]
    scalar = Operand((), **{**values, "low": 0.4, "high": 1.5})
    return [*found, Sample(name, operands=(scalar,), autograd=lambda t: fn(t[None], 0))]


def positions(name, fn):
    distinct = Operand(SHAPE, distinct=True)
    return [
        *(
            Sample(
                name,
                operands=(distinct,),
                attrs=attrs,
                oracle=lambda t, dim=0, keepdim=False: fn(t, axis=dim, keepdims=keepdim),
            )
            for attrs in (
                {},
                {"dim": 1},
                {"dim": -1, "keepdim": True},
                {"dim": None},
                {"dim": None, "keepdim": True},
            )
        ),
        Sample(
            name,
            operands=(Operand((3, 4), layout="transposed", distinct=True),),
            oracle=lambda t: fn(t, axis=0),
        ),
        # the first of equals
        Sample(name, operands=(np.array([2.0, 5.0, 5.0, 2.0]),), oracle=lambda t: fn(t, axis=0)),
        Sample(name, operands=(INTEGERS,), attrs={"dim": 1}, oracle=lambda t, dim: fn(t, axis=dim)),
        Sample(name, operands=(UNSIGNED,), attrs={"dim": 1}, oracle=lambda t, dim: fn(t, axis=dim)),
    ]


def reversed_cumsum(dy, dim):
    return np.flip(np.cumsum(np.flip(dy, dim), dim), dim)


def exclusive_products(dy, t, axis, keepdims):
    """The product of the others in each row, one by one."""
    others = [[np.prod(np.delete(row, i)) for i in range(len(row))] for row in t]
    return np.array(others) * dy[:, None]


GROWING = Operand((4096,), low=0.5, high=1.5)
"""Terms of about one: a sum kept in 16 bits would stop growing at 256 or 2048."""

LEVELS = [-1.0, 0.5, 1.25]


def counted(t, levels, absolute_of_input):
    """How many elements each half-open interval between levels holds."""
    values = np.abs(t) if absolute_of_input else t
    bounds = [-np.inf, *levels, np.inf]
    return np.array(
        [((values >= low) & (values < high)).sum() for low, high in zip(bounds, bounds[1:])],
        np.uint32,
    )


SAMPLES = [
    *(sample for name, (fn, values) in ORACLES.items() for sample in samples_of(name, fn, values)),
    *positions("argmax", np.argmax),
    *positions("argmin", np.argmin),
    *(
        Sample(
            name,
            operands=(operand,),
            attrs={"axis": 1},
            oracle=lambda t, axis, fn=fn: fn(t, axis=axis, dtype=t.dtype),
        )
        for name, fn in (("sum", np.sum), ("prod", np.prod))
        for operand in (INTEGERS, UNSIGNED)
    ),
    *(
        Sample(
            name,
            operands=(operand,),
            attrs={"axis": 1},
            oracle=lambda t, axis, fn=fn: fn(t, axis=axis),
        )
        for name, fn in (
            ("max", np.max),
            ("min", np.min),
            ("median", lambda t, axis: np.sort(t, axis)[:, 1]),
        )
        for operand in (INTEGERS, UNSIGNED, LARGE)
    ),
    *(
        Sample(name, operands=(GROWING,), oracle=fn, grads=None)
        for name, fn in (
            ("sum", np.sum),
            ("mean", np.mean),
            ("l1", np.sum),
            ("sumsquare", lambda t: (t**2).sum()),
        )
    ),
    Sample("cumsum", operands=(Operand((600,), low=0.5, high=1.5),), oracle=np.cumsum, grads=None),
    Sample("sum", operands=((3, 0),), attrs={"axis": 1}, autograd=ORACLES["sum"][0]),
    Sample("prod", operands=(ZEROS,), attrs={"axis": 1}, autograd=ORACLES["prod"][0]),
    Sample(
        "max", operands=(np.array([1.0, 3.0, 3.0]),), autograd=lambda t: t.amax(), grads=None
    ),  # equals: no derivative
    # no derivative at zero
    Sample("l2", operands=(np.zeros(3),), oracle=lambda t: np.array(0.0), grads=None),
    Sample(
        "logsumexp",
        operands=(np.array([[300.0, 301.0], [-300.0, -302.0]]),),
        attrs={"axis": 1},
        oracle=lambda t, axis: np.logaddexp(t[:, 0], t[:, 1]),
        grads=None,
    ),
    Sample(
        "extremum_grad",
        operands=((2,), np.array([3.0, 2.0]), np.array([[3.0, 3.0], [2.0, 1.0]])),
        attrs={"axis": 1, "keepdims": False},
        oracle=lambda dy, y, t, axis, keepdims: dy[:, None] * [[0.5, 0.5], [1, 0]],
    ),
    Sample(
        "prod_grad",
        operands=((3,), ZEROS),
        attrs={"axis": 1, "keepdims": False},
        oracle=exclusive_products,
    ),
    Sample(
        "median_grad",
        operands=((2,), np.array([[3.0, 1.0, 2.0], [5.0, 6.0, 4.0]])),
        attrs={"axis": 1, "keepdims": False},
        oracle=lambda dy, t, axis, keepdims: dy[:, None] * [[0, 0, 1], [1, 0, 0]],
    ),
    Sample(
        "l2_grad",
        operands=(
            np.array([[0.5], [1.0]]),
            np.array([[5.0], [0.0]]),
            np.array([[3.0, 4.0], [0.0, 0.0]]),
        ),
        oracle=lambda dy, y, t: np.array([[0.3, 0.4], [0.0, 0.0]]),
    ),
    Sample("cumsum", operands=((3, 4),), autograd=lambda t: t.cumsum(0)),
    Sample(
        "cumsum",
        operands=(Operand((3, 4), layout="transposed"),),
        attrs={"dim": -1},
        autograd=lambda t, dim: t.cumsum(dim),
    ),
    Sample(
        "cumsum",
        operands=(INTEGERS,),
        attrs={"dim": 1},
        oracle=lambda t, dim: np.cumsum(t, dim, dtype=np.int32),
    ),
    Sample(
        "cumsum",
        operands=(UNSIGNED,),
        attrs={"dim": 1},
        oracle=lambda t, dim: np.cumsum(t, dim, dtype=np.uint32),
    ),
    Sample("cumsum_grad", operands=((3, 4),), attrs={"dim": 1}, oracle=reversed_cumsum),
    Sample("lamb_square", operands=((3, 4),), oracle=lambda t: (t**2).sum()),
    Sample(
        "lamb_square",
        operands=(Operand((300,), low=20.0, high=30.0),),
        oracle=lambda t: (t**2).sum(),
    ),  # beyond float16
    Sample(
        "histogram",
        operands=((4, 5),),
        attrs={"levels": LEVELS, "absolute_of_input": False},
        oracle=counted,
    ),
    Sample(
        "histogram",
        operands=(Operand((4, 5), layout="transposed"),),
        attrs={"levels": LEVELS, "absolute_of_input": True},
        oracle=counted,
    ),
    Sample(
        "histogram",
        operands=(np.array([[0.5, -1.0, 1.25], [-0.5, 0.25, -1.25]]),),
        attrs={"levels": LEVELS, "absolute_of_input": False},
        oracle=counted,
    ),
    Sample(
        "histogram",
        operands=((7,),),
        attrs={"levels": [], "absolute_of_input": False},
        oracle=counted,
    ),
    Sample(
        "histogram",
        operands=(np.array([0.7, 0.1]),),
        attrs={"levels": [0.1, 0.7], "absolute_of_input": False},
        # a number equals its own level in every dtype
        oracle=lambda t, **attrs: np.array([0, 1, 1], np.uint32),
    ),
]

REFUSALS = [
    *(
        Refusal(
            name,
            operands=((3,),),
            dtype=popxl.complex64,
            error=DTypeError,
            says="expected real numbers",
        )
        for name in ("max", "min", "median", "argmax", "argmin")
    ),
    *(
        refusal
        for name in ORACLES
        for refusal in (
            Refusal(
                name,
                operands=((3, 4),),
                attrs={"axis": 2},
                error=ShapeError,
                says="expected -2 <= axis < 2",
            ),
            Refusal(
                name,
                operands=((3, 4),),
                attrs={"axis": [1, -1]},
                error=ShapeError,
                says="expected each axis once",
            ),
            Refusal(
                name,
                operands=(Operand((3,), dtype=popxl.bool),),
                error=DTypeError,
                says="got t bool",
            ),
        )
    ),
    *(
        Refusal(name, operands=((3, 0),), error=ShapeError, says="expected at least one element")
        for name in ("mean", "max", "min", "median", "argmax", "argmin")
    ),
    *(
        Refusal(name, operands=((3, 4),), attrs={"dim": -3}, error=ShapeError, says="got axis -3")
        for name in ("argmax", "argmin", "cumsum")
    ),
    Refusal("mean", operands=(INTEGERS,), error=DTypeError, says="expected floating point"),
    Refusal("lamb_square", operands=(INTEGERS,), error=DTypeError, says="expected floating point"),
    *(
        Refusal(
            "histogram",
            operands=((3,),),
            attrs={"levels": levels, "absolute_of_input": False},
            error=ValueError,
            says="each larger than the one before",
        )
        for levels in ([1.0, 1.0], [0.0, 2.0, 1.0], [0.0, float("nan")])
    ),
    Refusal(
        "histogram",
        operands=(INTEGERS,),
        attrs={"levels": [1.0], "absolute_of_input": False},
        error=DTypeError,
        says="expected floating point",
    ),
]
