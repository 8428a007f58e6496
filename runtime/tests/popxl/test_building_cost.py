"""Building, differentiating and preparing a program takes work in proportion to the program,
however calls are nested.

Work is counted, in calls of Python functions: clocks would tell about the machine.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import popxl
import popxl_addons as addons
import popxl_engine.engine  # noqa: F401 - what is loaded once is not counted
import pytest
from popxl import ops
from popxl.context import ExecutionContext, _execution_context
from popxl.errors import GraphError
from popxl.planning import plan
from popxl.tensor import Tensor
from popxl.transforms import autodiff
from popxl.transforms.clone import prune
from popxl.transforms.fragments import arrange_fragments
from popxl.transforms.storage import Summaries
from popxl.verify import verify
from popxl_engine.lowering import outlining


class TooMuch(Exception):
    """More work than a test allows."""


def work(what: Callable[[], Any], limit: float = float("inf")) -> int:
    """Calls of Python functions in ``what``. TooMuch as soon as there are more than ``limit``."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"
        if count > limit:
            sys.setprofile(None)
            raise TooMuch(f"more than {limit:.0f} calls of functions")

    sys.setprofile(note)
    try:
        what()
    finally:
        sys.setprofile(None)
    return count


def grows_linearly(what: Callable[[int], Callable[[], Any]], size: int) -> None:
    """Twice the program takes at most two and a half times the work. ``what(size)`` prepares what
    is measured.
    """
    what(2)()  # what is done once for all
    work(what(size + 2), 2.5 * work(what(size // 2 + 1)))


def lines(what: Callable[[], Any]) -> int:
    """Lines of Python that run in ``what``: loops within one function count, too."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        what()
    finally:
        sys.settrace(before)
    return count


def test_recomputation_takes_work_in_proportion_to_the_activations() -> None:
    def gradient(size: int) -> addons.GraphWithNamedArgs:
        def chain(t: Tensor, u: Tensor) -> Tensor:
            for _ in range(size):
                t = t * u
            return t

        ir = popxl.Ir()
        with ir.main_graph:
            x = popxl.variable(np.ones(2, np.float32))
            return addons.autodiff(addons.GraphWithNamedArgs(ir.create_graph(chain, x, x)))

    small, large = gradient(50), gradient(200)
    assert len(large.graph.inputs) > 200
    few, many = (lines(lambda g=g: addons.recompute_graph(g)) for g in (small, large))
    assert many < 5 * few


# Graphs in graphs. Each has two inputs and calls the next one twice.


def _by_value(inner: popxl.Graph, t: Tensor, u: Tensor) -> Tensor:
    (once,) = ops.call(inner, t, u)
    return ops.call(inner, once, u)[0]


def test_each_level_of_calls_costs_autodiff_the_same() -> None:
    def differentiate(depth: int) -> Callable[[], Any]:
        ir = popxl.Ir()
        with ir.main_graph:
            x = popxl.variable(np.ones(2, np.float32))
            graph = ir.create_graph(lambda t, u: t + u, x, x)
            for _ in range(depth):
                graph = ir.create_graph(_by_value, graph, x, x)
            return lambda: autodiff(graph)

    differentiate(2)()  # what is done once for all
    few, some, many = (work(differentiate(depth)) for depth in (30, 60, 90))
    assert many - some <= 1.01 * (some - few)


def _by_reference(inner: popxl.Graph, t: Tensor, u: popxl.TensorByRef) -> Tensor:
    (once,) = ops.call(inner, t, u)
    return ops.call(inner, once, u)[0]


def _repeated(inner: popxl.Graph, t: Tensor, u: Tensor) -> Tensor:
    (once,) = ops.repeat(inner, 2, t, u)
    return ops.repeat(inner, 2, once, u)[0]


def _repeated_by_reference(
    inner: popxl.Graph, t: popxl.TensorByRef, u: popxl.TensorByRef
) -> Tensor:
    (once,) = ops.repeat(inner, 2, t, t)
    return ops.repeat(inner, 2, once, u)[0]


def _conditional(inner: popxl.Graph, t: Tensor, u: Tensor) -> Tensor:
    is_equal = ops.reshape(ops.slice(ops.equal(t, u), [0], [1]), ())
    return ops.conditional(is_equal, inner, inner, [t, u], [u, t])[0]


CALLERS = {
    "calls": _by_value,
    "calls by reference": _by_reference,
    "repeats": _repeated,
    "repeats by reference": _repeated_by_reference,
    "conditionals": _conditional,
}


def _adding(t: Tensor, u: Tensor) -> Tensor:
    return t + u


def _reading(t: Tensor, u: popxl.TensorByRef) -> Tensor:
    return t + u


def _writing(t: popxl.TensorByRef, u: popxl.TensorByRef) -> Tensor:
    ops.add_(u, t + 1.0)
    return t + t


def _storing(t: Tensor, u: popxl.TensorByRef) -> Tensor:
    """Loads, changes and stores a row of remote memory."""
    buffer = popxl.gcg().ir.remote_buffers[0]
    row = popxl.constant(1, popxl.uint32)
    ops.remote_store(buffer, row, ops.remote_load(buffer, row) + t)
    return t + u


LEAVES = {"calls by reference": _writing, "repeats by reference": _writing}


def nested(depth: int, kind: str, leaf: Any = None) -> Any:
    """(Ir, outermost graph) of a program that does not call it yet."""
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer((4,), popxl.float32, 4)
        popxl.remote_variable(np.ones(4, np.float32), buffer, 1)
        x = popxl.variable(np.ones(4, np.float32))
        graph = ir.create_graph(leaf or LEAVES.get(kind, _adding), x, x)
        for _ in range(depth):
            graph = ir.create_graph(CALLERS[kind], graph, x, x)
    return ir, graph


def called(depth: int, kind: str, leaf: Any = None) -> popxl.Ir:
    """A program that calls nested graphs and stores the result."""
    ir, graph = nested(depth, kind, leaf)
    with ir.main_graph:
        x, y = popxl.variable(np.ones(4, np.float32)), popxl.variable(np.ones(4, np.float32))
        (y,) = ops.call(graph, x, y)
        ops.host_store(popxl.d2h_stream(y.shape, y.dtype), y)
    return ir


@pytest.mark.parametrize("kind", CALLERS)
def test_building_nested_graphs_is_linear_in_their_depth(kind: str) -> None:
    grows_linearly(lambda depth: lambda: called(depth, kind), 40)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["calls", "calls by reference", "conditionals"])
def test_differentiating_nested_graphs_is_linear_in_their_depth(kind: str) -> None:
    leaf = _reading if kind == "calls by reference" else None

    def prepared(depth: int) -> Callable[[], Any]:
        _, graph = nested(depth, kind, leaf)
        return lambda: autodiff(graph)

    grows_linearly(prepared, 40)


def test_differentiating_does_not_look_through_a_stack_that_is_as_deep_as_the_calls() -> None:
    def steps(depth: int) -> int:
        graph = nested(depth, "calls")[1]
        return lines(lambda: autodiff(graph))

    assert steps(64) < 2.2 * steps(32)


@pytest.mark.parametrize("kind", CALLERS)
def test_checking_and_pruning_nested_graphs_is_linear_in_their_depth(kind: str) -> None:
    def prepared(depth: int) -> Callable[[], Any]:
        ir, graph = nested(depth, kind)
        return lambda: (verify(ir), prune(graph))

    grows_linearly(prepared, 40)


PROGRAMS = [
    *((kind, None) for kind in CALLERS),
    ("calls by reference", _storing),
    ("calls", _storing),
]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "leaf"), PROGRAMS)
def test_making_a_session_is_linear_in_the_depth_of_calls(
    kind: str, leaf: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(outlining, "MOST_INLINED", 2)
    monkeypatch.setattr(outlining, "MOST_INLINED_BELOW", 2)

    def prepared(depth: int) -> Callable[[], Any]:
        ir = called(depth, kind, leaf)
        return lambda: popxl.Session(ir, "cpu")

    grows_linearly(prepared, 40)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "leaf"), PROGRAMS)
def test_a_session_is_made_where_a_run_would_do_more_calls_than_anybody_can_wait_for(
    kind: str, leaf: Any
) -> None:
    ir = called(32, kind, leaf)
    work(lambda: popxl.Session(ir, "cpu"), 3e6)


def test_transfers_of_weights_look_at_nested_graphs_once() -> None:
    def prepared(depth: int) -> Callable[[], Any]:
        ir, graph = nested(depth, "calls by reference", _storing)
        with ir.main_graph:
            own = popxl.remote_buffer((4,), popxl.float32, 1)
            x = popxl.variable(np.ones(4, np.float32))
            ops.call(graph, x, x)
            with _execution_context(ExecutionContext.WeightsToHostFragment):
                ops.remote_store(own, 0, x)
        return lambda: arrange_fragments(ir)

    grows_linearly(prepared, 40)


@pytest.mark.slow
def test_an_offset_outside_its_buffer_is_found_below_deep_calls() -> None:
    def leaf(t: Tensor, row: Tensor) -> Tensor:
        return t + ops.remote_load(popxl.gcg().ir.remote_buffers[0], row)

    def caller(inner: popxl.Graph, t: Tensor, row: Tensor) -> Tensor:
        (once,) = ops.call(inner, t, row)
        return ops.call(inner, once, row)[0]

    def program(offset: int) -> popxl.Ir:
        ir = popxl.Ir()
        with ir.main_graph:
            popxl.remote_buffer((4,), popxl.float32, 4)
            x, row = popxl.variable(np.ones(4, np.float32)), popxl.constant(offset, popxl.uint32)
            graph = ir.create_graph(leaf, x, row)
            for _ in range(30):
                graph = ir.create_graph(caller, graph, x, row)
            ops.call(graph, x, row)
        return ir

    popxl.Session(program(3), "cpu")
    with pytest.raises(GraphError, match=r"got offset 4; expected 0 <= offset < 4 entries"):
        popxl.Session(program(4), "cpu")


@pytest.mark.slow
def test_a_plan_says_when_a_program_runs_for_too_long_to_dry_run() -> None:
    with pytest.raises(
        GraphError, match=r"plan: got a program whose dry run runs \d+ instructions"
    ):
        plan(called(40, "calls"))


# Flat programs


def chain(count: int) -> popxl.Ir:
    """A program of ops that follow each other."""
    ir = popxl.Ir()
    with ir.main_graph:
        x = y = popxl.variable(np.ones(4, np.float32))
        for _ in range(count):
            y = y + x
        ops.host_store(popxl.d2h_stream(y.shape, y.dtype), y)
    return ir


def calls(count: int) -> popxl.Ir:
    """A program that calls a graph of eight ops many times."""

    def body(t: Tensor, weight: Tensor) -> Tensor:
        for _ in range(8):
            t = t + weight
        return t

    ir = popxl.Ir()
    with ir.main_graph:
        x = y = popxl.variable(np.ones(4, np.float32))
        graph = ir.create_graph(body, x, x)
        for _ in range(count):
            (y,) = ops.call(graph, y, x)
        ops.host_store(popxl.d2h_stream(y.shape, y.dtype), y)
    return ir


@pytest.mark.slow
@pytest.mark.parametrize("program", [chain, calls])
def test_sessions_of_flat_programs_are_linear_in_their_size(
    program: Callable[[int], popxl.Ir],
) -> None:
    def prepared(size: int) -> Callable[[], Any]:
        ir = program(size)
        return lambda: popxl.Session(ir, "cpu")

    grows_linearly(prepared, 2000)


@pytest.mark.slow
def test_a_call_more_costs_a_session_less_than_the_ops_that_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("POPXL_VERIFY")
    few, many = calls(600), calls(1200)
    before = work(lambda: popxl.Session(few, "cpu"))
    assert (work(lambda: popxl.Session(many, "cpu")) - before) / 600 < 300


@pytest.mark.slow
def test_chains_of_views_are_looked_at_once() -> None:
    def prepared(size: int) -> Callable[[], Any]:
        ir = popxl.Ir()

        def viewed(t: popxl.TensorByRef) -> Tensor:
            for i in range(size):
                t = ops.reshape_(t, (2, 2) if i % 2 else (4,))
                ops.add_(t, t)
            return t

        with ir.main_graph:
            graph = ir.create_graph(viewed, popxl.variable(np.ones(4, np.float32)))

        def ask() -> None:
            summaries = Summaries()
            assert summaries.modified_storage(graph) == set(graph.inputs)
            assert all(
                summaries.roots(t) == set(graph.inputs) for op in graph.ops for t in op.outputs
            )

        return ask

    grows_linearly(prepared, 2000)


@pytest.mark.slow
def test_the_gradient_of_what_a_long_chain_of_views_shows_is_found() -> None:
    def shown(t: Tensor) -> Tensor:
        views = t
        for i in range(2001):
            views = ops.reshape(views, (2, 2) if i % 2 else (4,))
        return views * views

    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.arange(4, dtype=np.float32).reshape(2, 2))
        info = autodiff(ir.create_graph(shown, x))
        call = ops.call_with_info(info.forward_graph, x)
        (dx,) = ops.call(
            info.graph, popxl.constant(np.ones(4, np.float32)), inputs_dict=info.inputs_dict(call)
        )[:1]
        stream = popxl.d2h_stream(dx.shape, dx.dtype)
        ops.host_store(stream, dx)
    with popxl.Session(ir, "cpu") as session:
        np.testing.assert_array_equal(
            session.run()[stream], 2 * np.arange(4, dtype=np.float32).reshape(2, 2)
        )


@pytest.mark.slow
def test_many_graphs_of_one_name_are_numbered_without_looking_at_each_other() -> None:
    def prepared(size: int) -> Callable[[], Any]:
        ir = popxl.Ir()

        def create() -> None:
            for _ in range(size):
                ir.create_empty_graph("layer")

        return create

    grows_linearly(prepared, 1000)
    ir = popxl.Ir()
    names = [ir.create_empty_graph("layer").name for _ in range(3)]
    assert names == [f"layer_subgraph({i})" for i in range(3)]


def test_what_a_summary_says_of_nested_graphs() -> None:
    ir, graph = nested(5, "calls by reference")
    summaries = Summaries()
    (op, *_) = graph.ops
    assert summaries.modified(op) == [graph.inputs[1]] and summaries.first_write(graph) is op
    assert not summaries.has_effect(op, frozenset({"remote"}))
    _, storing = nested(5, "calls by reference", _storing)
    assert Summaries().has_effect(storing.ops[0], frozenset({"remote"}))
    assert Summaries().modified(storing.ops[0]) == []
