"""The engine gives the interpreter's numbers, bit for bit, on random programs.

Every rule that keeps a copy is needed.
"""

import random
from typing import Any, Dict, FrozenSet, List, Sequence

import numpy as np
import popxl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from popxl_engine.engine import Engine
from popxl_engine.passes import legalization
from popxl_engine.passes.elide_copies import ALL_RULES
from random_programs import COLLECTIVES, KINDS, Built, Step, build

NUMBERS = st.integers(0, 31)


def programs(kinds: Sequence[str]) -> Any:
    """Lists of steps for the main graph and for called graphs."""
    step = st.tuples(st.sampled_from(kinds), NUMBERS, NUMBERS, NUMBERS)
    return st.tuples(
        st.lists(step, max_size=12), st.lists(st.lists(step, min_size=1, max_size=6), max_size=3)
    )


RUNS = 2


def observe(
    built: Built, interpret: bool, rules: FrozenSet[str] = ALL_RULES
) -> List[Dict[str, np.ndarray]]:
    """Every output and every variable after each of some runs, and the inputs, which nothing may
    change.
    """
    replicas = built.ir.replication_factor
    engine = Engine(built.ir, range(replicas), interpret=interpret, passes=legalization(rules))
    streams = sorted(built.ir.get_all_d2h_streams(), key=lambda s: s.tensor_id)
    inputs = {s: a.copy() for s, a in built.inputs.items()}
    seen = []
    for _ in range(RUNS):
        outputs = {s: np.zeros((1, replicas, *s.shape), s.dtype.as_numpy()) for s in streams}
        engine.run(inputs, outputs)
        values: Dict[str, Any] = {s.tensor_id: a for s, a in outputs.items()}
        values.update((v.name, engine.read(v)) for v in built.ir.main_graph.variables)
        values.update((f"input {s.tensor_id}", a) for s, a in inputs.items())
        seen.append(values)
    return seen


def differences(
    steps: Sequence[Step],
    graphs: Sequence[Sequence[Step]],
    rules: FrozenSet[str] = ALL_RULES,
    replicas: int = 1,
    dtype: popxl.dtype = popxl.float32,
) -> List[str]:
    """Names of values that differ between engine and interpreter."""
    expected = observe(build(steps, graphs, replicas, dtype), interpret=True)
    found = observe(build(steps, graphs, replicas, dtype), interpret=False, rules=rules)
    pairs = ((i, n, a[n], b[n]) for i, (a, b) in enumerate(zip(expected, found)) for n in a)
    return [f"run {i}: {n}" for i, n, a, b in pairs if not np.array_equal(a, b, equal_nan=True)]


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(KINDS))
def test_engine_equals_interpreter_bit_for_bit(program: Any) -> None:
    assert differences(*program) == []


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(KINDS))
def test_engine_equals_interpreter_on_integers_that_live_on_the_host(program: Any) -> None:
    assert differences(*program, dtype=popxl.int32) == []


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(KINDS + COLLECTIVES * 2))
def test_engine_equals_interpreter_on_four_replicas(program: Any) -> None:
    assert differences(*program, replicas=4) == []


# A called graph multiplies a transposed input; its result is reshaped as a view, through which it
# is written.
STRIDED = (
    [
        ("call", 0, 2, 0),
        ("reshape_", 3, 2, 0),
        ("add_", 3, 3, 0),
        ("reshape_", 4, 2, 0),
        ("add_", 4, 4, 0),
    ],
    [[("count", 0, 2, 0), ("transpose", 1, 0, 0), ("mul", 3, 0, 0)]],
)


def corpus(size: int, kinds: Sequence[str] = KINDS) -> Any:
    """Random programs that are the same every time."""
    yield STRIDED
    draw = random.Random(7)
    for _ in range(size):

        def step():
            return (
                draw.choice(kinds),
                draw.randrange(32),
                draw.randrange(32),
                draw.randrange(32),
            )  # noqa: E731

        yield [step() for _ in range(12)], [[step() for _ in range(5)] for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("rule", sorted(ALL_RULES))
def test_without_any_one_rule_some_program_goes_wrong(rule: str) -> None:
    replicas, kinds = (4, KINDS + COLLECTIVES * 2) if rule == "members_read" else (1, KINDS)
    for program in corpus(300, kinds):
        try:
            if differences(*program, rules=ALL_RULES - {rule}, replicas=replicas):
                return
        except RuntimeError:  # a view that would have been copied
            return
    pytest.fail(f"no program needs the rule {rule!r}")


def test_a_row_that_is_loaded_changed_and_stored_is_never_copied() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer((4,), popxl.float32, 2)
        variable = popxl.remote_variable(np.ones(4, np.float32), buffer, 1)
        x = popxl.ops.remote_load(buffer, 1)
        popxl.ops.add_(x, popxl.constant(np.ones(4, np.float32)))
        popxl.ops.remote_store(buffer, 1, x)
    engine = Engine(ir, range(1))
    assert engine.program is not None and "clone(" not in engine.program.source.text()
    engine.run({}, {})
    assert engine.read(variable).tolist() == [2, 2, 2, 2]
