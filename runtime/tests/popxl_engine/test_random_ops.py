"""The engine gives the interpreter's numbers on random programs over the whole table of ops."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import popxl
import pytest
from helpers.engine_programs import observe
from helpers.op_families import FAMILIES, QUICK, family_program
from helpers.op_programs import OP_KINDS, build
from helpers.op_samples import SAMPLES
from helpers.quick import cases
from helpers.random_programs import COLLECTIVES, Step
from helpers.samples.sample import Sample
from helpers.tolerance import TOLERANCE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from popxl.extensions import bfloat16
from popxl.op_records import OPS

DTYPES = pytest.mark.parametrize("dtype", [popxl.float32, bfloat16], ids=lambda d: d.name)
NUMBERS = st.integers(0, 31)


def differences(
    samples: Sequence[Sample],
    steps: Sequence[Step],
    graphs: Sequence[Sequence[Step]],
    replicas: int,
    dtype: popxl.dtype,
) -> list[str]:
    """Names of values that differ between engine and interpreter: results by more than rounding,
    others by a bit.
    """
    expected = observe(build(samples, steps, graphs, replicas, dtype), interpret=True)
    found = observe(build(samples, steps, graphs, replicas, dtype), interpret=False)
    pairs = ((i, n, a[n], b[n]) for i, (a, b) in enumerate(zip(expected, found)) for n in a)
    return [
        f"run {i}: {n}"
        for i, n, a, b in pairs
        if not agree(a, b, dtype if n.startswith("raw") else None)
    ]


def agree(a: np.ndarray, b: np.ndarray, dtype: Any) -> bool:
    """Whether values are equal, within the tolerance of a dtype at the largest of them if one is
    given.
    """
    if a.dtype.kind != "f" or dtype is None:
        return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    relative, absolute = TOLERANCE[dtype]
    scale = np.abs(a[np.isfinite(a)]).max(initial=1.0)
    return np.allclose(
        a.astype(np.float64), b.astype(np.float64), relative, absolute * scale, equal_nan=True
    )


@pytest.mark.sampled(5)
@pytest.mark.quick_every(3)
@pytest.mark.parametrize("family", cases(sorted(FAMILIES), lambda family: family in QUICK))
@pytest.mark.parametrize(
    "dtype, replicas",
    [
        pytest.param(popxl.float32, 1, id="float32-1"),
        pytest.param(bfloat16, 4, marks=pytest.mark.slow, id="bfloat16-4"),
    ],
)
def test_engine_equals_interpreter_on_every_op_of_a_family(
    family: str, dtype: popxl.dtype, replicas: int
) -> None:
    assert differences(FAMILIES[family], *family_program(family, replicas), replicas, dtype) == []


def test_every_op_takes_part_in_random_programs() -> None:
    apart = {
        name
        for name, op in OPS.items()
        if op.effects & {"control", "host", "remote", "collective", "print", "clock"}
    }
    assert {s.op for samples in FAMILIES.values() for s in samples} | apart == set(OPS)


def programs(kinds: Sequence[str]) -> Any:
    """Lists of steps for the main graph and for called graphs. Half of them use an op of the whole
    table.
    """
    step = st.tuples(st.sampled_from(kinds), st.integers(0, len(SAMPLES) // 32), NUMBERS, NUMBERS)
    return st.tuples(
        st.lists(step, max_size=12), st.lists(st.lists(step, min_size=1, max_size=6), max_size=3)
    )


@pytest.mark.slow
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(OP_KINDS))
@DTYPES
def test_engine_equals_interpreter_on_the_whole_table_of_ops(
    dtype: popxl.dtype, program: Any
) -> None:
    assert differences(SAMPLES, *program, 1, dtype) == []


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(OP_KINDS + COLLECTIVES * 4))
@DTYPES
def test_engine_equals_interpreter_on_the_whole_table_of_ops_on_four_replicas(
    dtype: popxl.dtype, program: Any
) -> None:
    assert differences(SAMPLES, *program, 4, dtype) == []
