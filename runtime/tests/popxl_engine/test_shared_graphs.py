"""Graphs that are not inlined: one block for each way to use them, with the interpreter's
numbers.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import popxl
import pytest
from helpers.engine_programs import corpus, differences
from helpers.engine_runs import both, prepare, run, source
from helpers.random_programs import COLLECTIVES, KINDS
from popxl import ops
from popxl.extensions import profile
from popxl.ops import collectives
from popxl.tensor import Tensor
from popxl_engine.lowering import outlining

MOST, BELOW = outlining.MOST_INLINED, outlining.MOST_INLINED_BELOW


@pytest.fixture
def nothing_is_inlined(monkeypatch: Any) -> None:
    monkeypatch.setattr(outlining, "MOST_INLINED", 0)
    monkeypatch.setattr(outlining, "MOST_INLINED_BELOW", 0)


def functions(text: str) -> "list[str]":
    """The innermost names of the functions that graphs were made of: theirs have their tests' in
    front.
    """
    return [
        name.rsplit("_", 1)[-1] for name in re.findall(r"^def block_\d+_(\w+)", text, re.MULTILINE)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "expected"), [(MOST, ["main"]), (MOST + 1, ["half", "main"])])
def test_a_graph_that_is_called_very_often_is_one_function(
    count: int, expected: "list[str]"
) -> None:
    def half(t: Tensor) -> Tensor:
        return t * 0.5 + 1.0

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        x = popxl.variable([1.0, 5.0])
        graph = ir.create_graph(half, x)
        for _ in range(count):
            (x,) = ops.call(graph, x)
        return [x]

    assert functions(source(prepare(build))) == expected
    both(build)


@pytest.mark.parametrize(("count", "expected"), [(BELOW, 2), (BELOW + 1, 3)])
def test_a_graph_below_one_that_is_not_inlined_is_inlined_less_often(
    count: int, expected: int
) -> None:
    def half(t: Tensor) -> Tensor:
        return t * 0.5 + 1.0

    def halves(t: Tensor, inner: popxl.Graph) -> Tensor:
        for _ in range(count):
            (t,) = ops.call(inner, t)
        return t

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        x = popxl.variable([1.0, 5.0])
        graph = ir.create_graph(halves, x, ir.create_graph(half, x))
        for _ in range(MOST + 1):
            (x,) = ops.call(graph, x)
        return [x]

    assert functions(source(prepare(build))) == ["half", "halves", "main"][-expected:]


@pytest.mark.slow
def test_a_graph_counts_where_its_callers_are_inlined() -> None:
    def inner(t: Tensor) -> Tensor:
        return t + 1.0

    def outer(t: Tensor, inner: popxl.Graph) -> Tensor:
        for _ in range(20):
            (t,) = ops.call(inner, t)
        return t

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        x = popxl.variable([1.0])
        graph = ir.create_graph(outer, x, ir.create_graph(inner, x))
        for _ in range(15):
            (x,) = ops.call(graph, x)
        return [x]

    assert functions(source(prepare(build))) == ["inner", "main"]
    both(build)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_inlined")
@pytest.mark.parametrize(
    "dtype", [popxl.float32, popxl.int32], ids=["floats", "integers on the host"]
)
def test_random_programs_give_the_interpreters_numbers(dtype: popxl.dtype) -> None:
    for program in corpus(30):
        assert differences(*program, dtype=dtype) == []


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_inlined")
def test_random_programs_of_four_replicas_give_the_interpreters_numbers() -> None:
    for program in corpus(60, KINDS + COLLECTIVES * 2):
        assert differences(*program, replicas=4) == []


@pytest.mark.usefixtures("nothing_is_inlined")
def test_what_no_call_reads_is_not_computed() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        def body(x: Tensor) -> Sequence[Tensor]:
            return ops.exp(x), ops.tanh(x)

        x = popxl.variable([1.0, 2.0])
        graph = ir.create_graph(body, x)
        return [ops.call(graph, x)[0] + ops.call(graph, x * 2.0)[0]]

    text = source(prepare(build))
    assert functions(text) == ["body", "main"] and "k_exp" in text and "k_tanh" not in text
    both(build)


@pytest.mark.usefixtures("nothing_is_inlined")
def test_calls_that_read_other_results_have_other_blocks() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        def body(x: Tensor) -> Sequence[Tensor]:
            return ops.exp(x), ops.tanh(x)

        x = popxl.variable([1.0, 2.0])
        graph = ir.create_graph(body, x)
        return [ops.call(graph, x)[0], ops.call(graph, x)[1], ops.call(graph, x + 1.0)[1]]

    assert functions(source(prepare(build))) == ["body", "body", "main"]
    both(build)


@pytest.mark.usefixtures("nothing_is_inlined")
def test_the_same_variable_given_twice_by_reference_is_written_through_both() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        def body(a: popxl.TensorByRef, b: popxl.TensorByRef, c: Tensor) -> Tensor:
            ops.add_(a, c)
            ops.add_(b, a)
            return a + c

        x, y = popxl.variable([1.0, 2.0], name="x"), popxl.variable([3.0, 4.0], name="y")
        graph = ir.create_graph(body, x, y, x)
        return [
            ops.call(graph, *given)[0] for given in ((x, y, y), (x, x, y), (y, x, x), (y, y, x))
        ]

    assert functions(source(prepare(build))) == ["body", "body", "main"]
    both(build)


@pytest.mark.usefixtures("nothing_is_inlined")
def test_views_of_one_variable_given_in_another_order_are_not_confused() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        def body(a: popxl.TensorByRef, b: popxl.TensorByRef) -> Tensor:
            ops.add_(a, b)
            return a - b

        x = popxl.variable(np.arange(1.0, 7.0, dtype=np.float32).reshape(2, 3), name="x")
        first = ops.reshape_(ops.slice_(x, 0, 1, axis=0), (3,))
        second = ops.reshape_(ops.slice_(x, 1, 2, axis=0), (3,))
        graph = ir.create_graph(body, first, second)
        return [
            ops.call(graph, *given)[0]
            for given in ((first, second), (second, first), (first, second))
        ]

    both(build)


@pytest.mark.usefixtures("nothing_is_inlined")
def test_a_view_that_lies_otherwise_in_memory_has_a_block_of_its_own() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        def body(a: popxl.TensorByRef) -> Tensor:
            flat = ops.reshape_(a, (4,))
            ops.add_(flat, flat)
            return flat * 3.0

        x = popxl.variable(np.arange(4.0, dtype=np.float32).reshape(2, 2), name="x")
        turned = ops.transpose_(x)
        graph = ir.create_graph(body, x)
        return [ops.call(graph, given)[0] for given in (x, turned, x, turned)]

    assert functions(source(prepare(build))) == ["body", "body", "main"]
    both(build)


@pytest.mark.usefixtures("nothing_is_inlined")
def test_counters_and_rows_stay_on_the_host() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        buffer = popxl.remote_buffer((4,), popxl.float32, 4)
        for row in range(4):
            popxl.remote_variable(np.full(4, row + 1.0, np.float32), buffer, row)

        def body(n: Tensor) -> Sequence[Tensor]:
            x = ops.remote_load(buffer, n)
            ops.remote_store(buffer, n, x * 2.0)
            return n + 1, x

        n = popxl.constant(0, popxl.uint32)
        graph, loaded = ir.create_graph(body, n), []
        for _ in range(4):
            n, x = ops.call(graph, n)
            loaded.append(x)
        return loaded

    text = source(prepare(build))
    assert functions(text) == ["body", "body", "main"]  # the last call's counter is not read
    assert "to_device" not in text and "host_add" in text
    found = both(build)
    assert [found[1][key] for key in sorted(found[1])][:4] == [
        [2.0 * (row + 1)] * 4 for row in range(4)
    ]


@pytest.mark.usefixtures("nothing_is_inlined")
def test_updates_are_rounded_as_the_interpreter_rounds_them() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        def update(w: popxl.TensorByRef, by: Tensor) -> Tensor:
            ops.add_(w, by)
            ops.add_(w, by)
            return w * 2.0

        w = popxl.variable(np.ones(64, np.float16), popxl.float16, name="w")
        by = popxl.constant(np.full(64, 1e-4, np.float16), popxl.float16)
        graph = ir.create_graph(update, w, by)
        return [ops.call(graph, w, by)[0] for _ in range(3)]

    engines = [
        prepare(build, interpret, enableStochasticRounding=True) for interpret in (False, True)
    ]
    assert engines[0].program is not None and functions(engines[0].program.source.text())
    first, second = ([run(engine), run(engine)] for engine in engines)
    assert first == second
    assert len(set(first[0]["w"])) > 1  # it drew


@pytest.mark.usefixtures("nothing_is_inlined")
def test_what_a_called_block_does_counts_for_the_phase_that_calls_it() -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        buffer = popxl.remote_buffer((4,), popxl.float32, 2)
        popxl.remote_variable(np.ones((4,), np.float32), buffer, 0)
        popxl.remote_variable(np.ones((4,), np.float32), buffer, 1)
        x = popxl.variable(np.ones(4, np.float32))

        def fetch(t: Tensor, n: Tensor) -> Tensor:
            return collectives.replicated_all_reduce(t + ops.remote_load(buffer, n))

        n = popxl.constant(1, popxl.uint32)
        graph = ir.create_graph(fetch, x, n)

        def loading_phase(t: Tensor, n: Tensor) -> Tensor:
            return ops.call(graph, ops.call(graph, t, n)[0], n)[0]

        def other_phase(t: Tensor, n: Tensor) -> Tensor:
            return ops.call(graph, t, n)[0] * 2.0

        for phase in (loading_phase, other_phase):
            (x,) = ops.call(ir.create_graph(phase, x, n), x, n)
        ops.host_store(popxl.d2h_stream(x.shape, x.dtype), x)
    with popxl.Session(ir, "cpu") as session, profile(session) as profiles:
        session.run()
    (found,) = profiles
    nanoseconds = {phase.name.split(".")[-1]: phase.nanoseconds for phase in found.phases}
    for name, loads in (("loading_phase", 2), ("other_phase", 1)):
        assert nanoseconds[name]["load"] > 0 and nanoseconds[name]["collectives"] > 0
        spans = [s for s in found.spans if s.name.split(".")[-1] == name]
        assert len(spans) == 2  # one for each replica
        inside = [
            s
            for s in found.spans
            if s.lane == "load" and s.replica == 0 and spans[0].begin <= s.begin
        ]
        assert (
            len([s for s in inside if s.end <= next(p.end for p in spans if p.replica == 0)])
            >= loads
        )
    assert sum(s.lane == "load" for s in found.spans) == 6
