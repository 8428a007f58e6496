"""The engine gives the interpreter's numbers, bit for bit, on random programs.

Every rule that keeps a copy is needed.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import popxl
import pytest
from helpers.engine_programs import ALL_RULES, corpus, differences
from helpers.engine_runs import engine_of
from helpers.random_programs import COLLECTIVES, KINDS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

NUMBERS = st.integers(0, 31)


def programs(kinds: Sequence[str]) -> Any:
    """Lists of steps for the main graph and for called graphs."""
    step = st.tuples(st.sampled_from(kinds), NUMBERS, NUMBERS, NUMBERS)
    return st.tuples(
        st.lists(step, max_size=12), st.lists(st.lists(step, min_size=1, max_size=6), max_size=3)
    )


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
    assert differences(*program, replicas=4, overlaps=True) == []


ONCE_WRONG: dict[str, tuple[Any, dict[str, Any]]] = {
    "a transposed host value of which a view is written": (
        (
            [("transpose_", 0, 0, 0), ("repeat", 0, 1, 1)],
            [
                [("host_load", 0, 0, 0)],
                [
                    ("split", 0, 0, 0),
                    ("load_", 4, 0, 0),
                    ("reshape_", 3, 0, 0),
                    ("reverse_", 3, 1, 0),
                ],
            ],
        ),
        {"dtype": popxl.int32},
    ),
    "an alias that is made before a loop that writes it": (
        (
            [
                ("transpose_", 5, 0, 0),
                ("call", 0, 0, 0),
                ("sharded_slice", 0, 0, 0),
                ("repeat", 2, 6, 1),
            ],
            [[("variable", 21, 0, 0), ("concat_", 0, 0, 1)]],
        ),
        {"replicas": 4, "overlaps": True},
    ),
}


@pytest.mark.parametrize("name", ONCE_WRONG)
def test_programs_that_were_wrong_are_right(name: str) -> None:
    program, how = ONCE_WRONG[name]
    assert differences(*program, **how) == []


@pytest.mark.sampled(3)
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
    engine = engine_of(ir)
    assert engine.program is not None and "clone(" not in engine.program.source.text()
    engine.run({}, {})
    assert engine.read(variable).tolist() == [2, 2, 2, 2]
