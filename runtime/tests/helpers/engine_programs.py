"""Random programs for the engine, and where its numbers are not the interpreter's."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import popxl
from helpers.random_programs import KINDS, Built, Step, build
from popxl_engine.engine import Engine
from popxl_engine.passes import LEGALIZATION, LINKS_ALL, Pass
from popxl_engine.passes.elide_copies import RULES as COPY_RULES
from popxl_engine.passes.emulate_views import RULES as VIEW_RULES

RUNS = 2


RULED = {"emulate_views", "elide_copies"}
"""Passes that go by rules."""
ALL_RULES = COPY_RULES | VIEW_RULES | {"operands_apart"}
"""What keeps copies; one of them is a pass of its own."""


def legalization(rules: frozenset[str], overlaps: bool = False) -> list[Pass]:
    """The passes without which no code can be generated, with some of their rules.

    Args:
        overlaps: let collectives begin early and end late, too.
    """
    return [*LINKS_ALL] * overlaps + [
        replace(each, fn=partial(each.fn, rules=rules)) if each.name in RULED else each
        for each in LEGALIZATION
        if each.name in RULED or "operands_apart" in rules
    ]


def observe(
    built: Built, interpret: bool, rules: frozenset[str] = ALL_RULES, overlaps: bool = False
) -> list[dict[str, np.ndarray]]:
    """Every output and every variable after each of some runs, and the inputs, which nothing may
    change.
    """
    replicas = built.ir.replication_factor
    engine = Engine(built.ir, range(replicas), None if interpret else legalization(rules, overlaps))
    streams = sorted(built.ir.get_all_d2h_streams(), key=lambda s: s.tensor_id)
    inputs = {s: a.copy() for s, a in built.inputs.items()}
    seen = []
    for _ in range(RUNS):
        outputs = {s: np.zeros((1, replicas, *s.shape), s.dtype.as_numpy()) for s in streams}
        engine.run(inputs, outputs)
        values: dict[str, Any] = {s.tensor_id: a for s, a in outputs.items()}
        values.update((v.name, engine.read(v)) for v in built.ir.main_graph.variables)
        values.update((f"input {s.tensor_id}", a) for s, a in inputs.items())
        seen.append(values)
    return seen


@lru_cache(maxsize=512)
def interpreted(
    steps: tuple[Step, ...],
    graphs: tuple[tuple[Step, ...], ...],
    replicas: int,
    dtype: popxl.dtype,
) -> list[dict[str, np.ndarray]]:
    """What the interpreter gives: the same, whatever the engine goes by."""
    return observe(build(steps, graphs, replicas, dtype), interpret=True)


def differences(
    steps: Sequence[Step],
    graphs: Sequence[Sequence[Step]],
    rules: frozenset[str] = ALL_RULES,
    replicas: int = 1,
    dtype: popxl.dtype = popxl.float32,
    overlaps: bool = False,
) -> list[str]:
    """Names of values that differ between engine and interpreter."""
    expected = interpreted(tuple(steps), tuple(map(tuple, graphs)), replicas, dtype)
    found = observe(build(steps, graphs, replicas, dtype), False, rules, overlaps)
    pairs = ((i, n, a[n], b[n]) for i, (a, b) in enumerate(zip(expected, found)) for n in a)
    return [f"run {i}: {n}" for i, n, a, b in pairs if not np.array_equal(a, b, equal_nan=True)]


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
