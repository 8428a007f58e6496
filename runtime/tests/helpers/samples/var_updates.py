"""Samples of updates in place, and of Adam's and its relatives' updates."""

import numpy as np
import popxl
from popxl.errors import DTypeError, ShapeError

from .sample import Operand, Refusal, Same, Sample

A = (3, 4)
HALF = Operand(A, dtype=popxl.float16)
WIDE = Operand(A, dtype=popxl.float32)
SQUARES = Operand(A, low=0.01, high=2.0)
WIDE_SQUARES = Operand(A, dtype=popxl.float32, low=0.01, high=2.0)
SCALAR = Operand((), low=0.5, high=2.0)
STEP = np.array(2.0)
LAYOUTS = (Operand(A, layout="transposed"), Operand(A, layout="strided"))


def updates(name, fn, factors):
    """Samples of t and X of equal and of other widths and layouts, with factors as numbers and as
    tensors.
    """
    given = [Sample(name, operands=(A, A), attrs=attrs, oracle=fn) for attrs in factors]
    given += [
        Sample(name, operands=(A, other), attrs=factors[-1], oracle=fn) for other in (HALF, Same(0))
    ]
    given += [Sample(name, operands=LAYOUTS, attrs=factors[-1], oracle=fn)]
    given += [
        Sample(name, operands=(A, WIDE), attrs=factors[-1], oracle=fn, dtype=d)
        for d in (popxl.float16, popxl.bfloat16)
    ]
    if factors[-1]:
        given += [
            Sample(name, operands=(A, A, one), oracle=fn)
            for one in (np.array(0.3), np.array([0.3]))
        ]
        given += [
            Sample(
                name,
                operands=(A, A, Operand((), dtype=popxl.float32, low=0.1, high=0.9)),
                oracle=fn,
                dtype=popxl.float16,
            )
        ]
    return given


def sparse(t, X, indices, axis=0, f=1.0, W=None):
    t = t.copy()
    for i, index in enumerate(indices):
        place = [slice(None)] * t.ndim
        place[axis] = index
        t[tuple(place)] += f * np.take(X, i, axis)
    return t


def adam(m, v, weight=None, time_step=None, weight_decay=0.0, beta1=None, beta2=None, epsilon=1e-7):
    """The update alone; the step that is used is the one after the increment."""
    if time_step is not None:
        m, v = (
            a / (1 - b ** (np.asarray(time_step).reshape(()) + 1))
            for a, b in ((m, beta1), (v, beta2))
        )
    return m / (np.sqrt(v) + epsilon) + (weight_decay * weight if weight is not None else 0)


def adamax(m, v, weight=None, time_step=None, weight_decay=0.0, beta1=0.9, epsilon=1e-7):
    step = np.asarray(time_step).reshape(()) + 1
    return m / (1 - beta1**step) / (v + epsilon) + (
        weight_decay * weight if weight is not None else 0
    )


def lamb(t, x, r1, r2, learning_rate=1.0, max_weight_norm=np.inf):
    norm = np.minimum(np.sqrt(r1.reshape(())), max_weight_norm)
    ratio = norm / np.sqrt(r2) if r1 and r2 and max_weight_norm else 1.0
    return t - learning_rate * ratio * x


ADAM = {"beta1": 0.9, "beta2": 0.999}
DECAY = {"weight_decay": 0.1, **ADAM, "epsilon": 1e-5}
MOMENTS = {"acc_first_order": A, "acc_second_order": SQUARES}


def by_name(fn):
    """An oracle that is called with the operands' names."""
    return lambda acc_first_order, acc_second_order, **rest: fn(
        acc_first_order, acc_second_order, **rest
    )


SAMPLES = [
    *updates("accumulate_", lambda t, X, f=1.0: t + f * X, [{}, {"f": -0.25}]),
    *updates("accumulate_square_", lambda t, X, f=1.0: t + f * X**2, [{}, {"f": 0.3}]),
    *updates(
        "accumulate_mean_",
        lambda t, X, step: t * step / (step + 1) + X / (step + 1),
        [{"step": 0}, {"step": 3.0}],
    ),
    *updates("accumulate_moving_average_", lambda t, X, f: f * t + (1 - f) * X, [{"f": 0.9}]),
    *updates(
        "accumulate_moving_average_square_", lambda t, X, f: f * t + (1 - f) * X**2, [{"f": 0.9}]
    ),
    *updates("copy_var_update_", lambda t, X: X, [{}]),
    # The square of 300 exceeds float16, but not the float32 average that it goes into.
    Sample(
        "accumulate_moving_average_square_",
        operands=(np.zeros(1), np.array([300.0], np.float16)),
        attrs={"f": 0.5},
        oracle=lambda t, X, f: 0.5 * X**2,
        in_16_bits=False,
    ),
    Sample(
        "accumulate_",
        operands=(np.array([1, 2], np.int32), np.array([5, -7], np.int32)),
        oracle=lambda t, X: t + X,
    ),
    Sample(
        "accumulate_",
        operands=(np.array([1, 2], np.uint32), np.array([5, 7], np.uint32)),
        oracle=lambda t, X: t + X,
    ),
    Sample(
        "copy_var_update_",
        operands=(np.array([1, 2], np.uint32), np.array([5, 7], np.uint32)),
        oracle=lambda t, X: X,
    ),
    Sample("accumulator_scale_", operands=(A,), attrs={"f": 0.5}, oracle=lambda t, f: t * f),
    Sample("accumulator_scale_", operands=(LAYOUTS[0], np.array([0.7])), oracle=lambda t, f: t * f),
    Sample("accumulator_zero_", operands=(A,), oracle=np.zeros_like),
    Sample("accumulator_zero_", operands=(np.array([np.nan, np.inf]),), oracle=np.zeros_like),
    # Whole numbers beyond 2**53, which float64 does not hold.
    Sample(
        "accumulate_",
        operands=(np.array([2**60 + 1, -5]), np.array([2, 2**55 + 1])),
        attrs={"f": 3.0},
        oracle=lambda t, X, f: t + int(f) * X,
        dtype=popxl.int64,
    ),
    Sample(
        "accumulate_",
        operands=(np.array([2**63 + 5, 7], np.uint64), np.array([3, 2**63], np.uint64)),
        oracle=np.add,
        dtype=popxl.uint64,
    ),
    Sample(
        "accumulate_square_",
        operands=(np.array([1, 2]), np.array([2**29 + 1, -3])),
        oracle=lambda t, X: t + X * X,
        dtype=popxl.int64,
    ),
    Sample("accumulator_zero_", operands=(np.array([3, 4], np.uint32),), oracle=np.zeros_like),
    Sample(
        "sparse_accumulate_",
        operands=((5, 3), (4, 3), np.array([4, 0, 4, 2], np.int32)),
        oracle=sparse,
    ),
    Sample(
        "sparse_accumulate_",
        operands=((5, 3), (4, 3), np.array([4, 0, 4, 2], np.uint32)),
        attrs={"f": -0.5},
        oracle=sparse,
    ),
    Sample(
        "sparse_accumulate_",
        operands=(np.array([2**60 + 1, 0]), np.array([1, 1, 2**54 + 1]), np.array([0, 0, 1])),
        oracle=lambda t, X, indices: t + np.array([2, 2**54 + 1]),
        dtype=popxl.int64,
    ),
    Sample(
        "sparse_accumulate_",
        operands={"t": (3, 5), "X": (3, 2), "indices": np.array([1, 1], np.int32), "f": ()},
        attrs={"axis": -1},
        oracle=sparse,
    ),
    Sample(
        "sparse_accumulate_",
        operands={
            "t": (5,),
            "X": Operand((2,), dtype=popxl.float16),
            "indices": np.array([1, 1], np.int32),
            "W": (5,),
        },
        oracle=sparse,
    ),
    *(
        Sample("adam_updater", operands=MOMENTS, attrs=attrs, oracle=by_name(adam))
        for attrs in ({}, {"epsilon": 1e-3})
    ),
    Sample(
        "adam_updater", operands={**MOMENTS, "time_step": STEP}, attrs=ADAM, oracle=by_name(adam)
    ),
    Sample(
        "adam_updater",
        operands={**MOMENTS, "time_step": np.array([0.0])},
        attrs=ADAM,
        oracle=by_name(adam),
    ),
    Sample(
        "adam_updater",
        operands={**MOMENTS, "time_step": STEP, "weight": A},
        attrs=DECAY,
        oracle=by_name(adam),
    ),
    Sample(
        "adam_updater", operands={**MOMENTS, "weight": A, "weight_decay": ()}, oracle=by_name(adam)
    ),
    Sample(
        "adam_updater",
        operands={
            "acc_first_order": HALF,
            "acc_second_order": SQUARES,
            "weight": A,
            "time_step": STEP,
        },
        attrs=DECAY,
        oracle=by_name(adam),
    ),
    Sample(
        "adam_updater",
        operands={
            "acc_first_order": WIDE,
            "acc_second_order": WIDE_SQUARES,
            "weight": A,
            "time_step": Operand((), dtype=popxl.float32, low=3.0, high=3.1),
        },
        attrs=DECAY,
        oracle=by_name(adam),
        dtype=popxl.bfloat16,
    ),
    Sample("adamax_updater", operands={**MOMENTS, "time_step": STEP}, oracle=by_name(adamax)),
    Sample(
        "adamax_updater",
        operands={**MOMENTS, "time_step": STEP, "weight": A},
        attrs={"weight_decay": 0.1, "beta1": 0.8},
        oracle=by_name(adamax),
    ),
    *(
        Sample(
            "adam_var_update", operands=(A, A, np.array(r1), np.array(r2)), attrs=attrs, oracle=lamb
        )
        for r1, r2 in ((4.0, 9.0), (0.0, 9.0), (4.0, 0.0))
        for attrs in ({}, {"learning_rate": 0.1, "max_weight_norm": 1.5}, {"max_weight_norm": 0.0})
    ),
    Sample(
        "adam_var_update",
        operands=(A, A, Operand((1,), low=0.5), SCALAR, SCALAR, SCALAR),
        oracle=lamb,
    ),
]

STATE = {"acc_first_order": (3,), "acc_second_order": (3,)}

REFUSALS = [
    Refusal(
        "accumulate_",
        operands=((3,), (3,)),
        dtype=popxl.complex64,
        error=DTypeError,
        says="expected real numbers",
    ),
    Refusal(
        "adam_updater",
        operands={
            "acc_first_order": (3,),
            "acc_second_order": (3,),
            "weight": Operand((3,), popxl.int32),
        },
        attrs={"weight_decay": 0.1},
        error=DTypeError,
        says="got weight int32.*expected floating point",
    ),
    *(
        Refusal(
            name, operands=((3,), (4,)), attrs=attrs, error=ShapeError, says="expected equal shapes"
        )
        for name, attrs in (
            ("accumulate_", {}),
            ("accumulate_square_", {}),
            ("accumulate_mean_", {"step": 1}),
            ("accumulate_moving_average_", {"f": 0.5}),
            ("accumulate_moving_average_square_", {"f": 0.5}),
            ("copy_var_update_", {}),
        )
    ),
    *(
        Refusal(name, operands=((3,), (3,), (2,)), error=ShapeError, says="one element")
        for name in (
            "accumulate_",
            "accumulate_square_",
            "accumulate_mean_",
            "accumulate_moving_average_",
        )
    ),
    *(
        Refusal(
            name,
            operands=(np.array([1], np.int32), np.array([1], np.int32)),
            attrs={f: 1},
            error=DTypeError,
            says="floating point",
        )
        for name, f in (
            ("accumulate_mean_", "step"),
            ("accumulate_moving_average_", "f"),
            ("accumulate_moving_average_square_", "f"),
        )
    ),
    Refusal("accumulator_scale_", operands=((3,), (2,)), error=ShapeError, says="one element"),
    Refusal(
        "accumulator_zero_",
        operands=(Operand((3,), dtype=popxl.bool),),
        error=DTypeError,
        says="expected numbers",
    ),
    Refusal(
        "sparse_accumulate_",
        operands=((5, 3), (4, 3), (4,)),
        error=DTypeError,
        says="expected integers",
    ),
    Refusal(
        "sparse_accumulate_",
        operands=((5, 3), (3, 3), np.array([1, 2])),
        error=ShapeError,
        says=r"expected X of shape \[2, 3\]",
    ),
    Refusal(
        "adam_updater",
        operands=STATE,
        attrs={"weight_decay": 0.1},
        error=ValueError,
        says="weight_decay without weight",
    ),
    Refusal(
        "adam_updater",
        operands={**STATE, "time_step": ()},
        attrs={"beta1": 0.9},
        error=ValueError,
        says="without both betas",
    ),
    Refusal(
        "adam_updater",
        operands={**STATE, "acc_second_order": (4,)},
        error=ShapeError,
        says="acc_second_order.*expected equal shapes",
    ),
    Refusal(
        "adam_updater",
        operands={**STATE, "time_step": (2,)},
        attrs=ADAM,
        error=ShapeError,
        says="one element",
    ),
    Refusal("adamax_updater", operands=STATE, error=ValueError, says="got no time_step"),
    Refusal(
        "adam_var_update",
        operands=((3,), (4,), (), ()),
        error=ShapeError,
        says="expected equal shapes",
    ),
    Refusal(
        "adam_var_update", operands=((3,), (3,), (2,), ()), error=ShapeError, says="r1.*one element"
    ),
]
