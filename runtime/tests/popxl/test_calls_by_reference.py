"""`CallSiteInfo.set_parent_input_modified`: one call writes to its caller's tensor, other calls of
the graph do not.
"""

from typing import Any

import numpy as np
import popart
import popxl
import pytest
from popxl import ops
from popxl.printer import to_text
from popxl.transforms.clone import clone_ops
from popxl.transforms.storage import Summaries, changing_variables

both_ways = pytest.mark.parametrize("interpret", ["0", "1"])


def add_one(x: popxl.Tensor) -> popxl.Tensor:
    """Writes to its input, which is by value unless a call says otherwise."""
    return ops.add_(x, popxl.constant(1.0))


def variables(number: int) -> list[Any]:
    return [popxl.variable(np.float32(10 * i), name=f"v{i}") for i in range(number)]


def values(ir: popxl.Ir, wanted: list[Any]) -> list[float]:
    with popxl.Session(ir) as session:
        session.run()
        return [float(value) for value in session.get_tensors_data(wanted).values()]


@both_ways
def test_a_call_that_is_declared_to_write_does_and_the_others_of_its_graph_do_not(
    interpret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPXL_INTERPRET", interpret)
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        v = variables(4)
        graph = ir.create_graph(add_one, v[0])
        sites = [ops.call_with_info(graph, t) for t in v[:3]]
        sites[1].set_parent_input_modified(v[1])
        ops.call(graph, v[3])
        out = [popxl.d2h_stream((), popxl.float32) for _ in sites]
        for stream, site in zip(out, sites):
            ops.host_store(stream, site.outputs[0])
    assert [Summaries().modified(op) for op in ir.main_graph.ops[:4]] == [[], [v[1]], [], []]
    assert changing_variables(ir) == [v[1]]
    assert [
        " with %x by ref" in line for line in to_text(ir.main_graph).splitlines() if "call(" in line
    ] == [
        False,
        True,
        False,
        False,
    ]
    with popxl.Session(ir) as session:
        results = session.run()
        assert [float(results[stream]) for stream in out] == [1, 11, 21]
        assert [float(session.get_tensor_data(t)) for t in v] == [0, 11, 20, 30]


@pytest.mark.slow
@both_ways
@pytest.mark.parametrize("count", [1, 3])
def test_a_loop_that_is_declared_to_write_adds_up_and_another_of_its_graph_starts_anew(
    interpret: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPXL_INTERPRET", interpret)

    def body(x: popxl.Tensor) -> None:
        add_one(x)

    ir = popxl.Ir()
    with ir.main_graph:
        v = variables(2)
        graph = ir.create_graph(body, v[0])
        ops.repeat_with_info(graph, count, v[0])
        ops.repeat_with_info(graph, count, v[1]).set_parent_input_modified(v[1])
    assert values(ir, v) == [0, 10 + count]


@both_ways
def test_a_carried_input_of_a_loop_can_be_declared_written(
    interpret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first iteration writes to the caller's tensor; later ones to what the one before
    returned.
    """
    monkeypatch.setenv("POPXL_INTERPRET", interpret)
    ir = popxl.Ir()
    with ir.main_graph:
        v = variables(2)
        graph = ir.create_graph(add_one, v[0])
        ops.repeat_with_info(graph, 3, v[0])
        ops.repeat_with_info(graph, 3, v[1]).set_parent_input_modified(v[1])
    assert values(ir, v) == [0, 11]


@both_ways
def test_a_loop_takes_a_value_once_though_it_changes_what_that_was_read_from(
    interpret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``for _ in range(3): v += a`` with the first value of v as a."""
    monkeypatch.setenv("POPXL_INTERPRET", interpret)

    def add(x: popxl.TensorByRef, a: popxl.Tensor) -> None:
        ops.add_(x, a)

    ir = popxl.Ir()
    with ir.main_graph:
        (_, v) = variables(2)
        ops.repeat(ir.create_graph(add, v, v), 3, v, v)
    assert values(ir, [v]) == [10 + 3 * 10]


def test_a_write_goes_through_nested_calls_where_each_is_declared() -> None:
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        v = variables(2)
        inner = ir.create_graph(add_one, v[0])

        def outer(x: popxl.Tensor) -> None:
            ops.call_with_info(inner, x).set_parent_input_modified(x)

        graph = ir.create_graph(outer, v[0])
        ops.call(graph, v[0])
        ops.call_with_info(graph, v[1]).set_parent_input_modified(v[1])
    assert values(ir, v) == [0, 11]


def test_a_graph_that_takes_an_input_by_reference_changes_it_in_every_call() -> None:
    def by_reference(x: popxl.TensorByRef) -> None:
        add_one(x)

    ir = popxl.Ir()
    with ir.main_graph:
        v = variables(2)
        graph = ir.create_graph(by_reference, v[0])
        for t in v:
            ops.call(graph, t)
    assert values(ir, v) == [1, 11]


def test_only_a_call_that_writes_is_ambiguous() -> None:
    def program(declared: bool) -> popxl.Ir:
        ir = popxl.Ir()
        with ir.main_graph:
            (v,) = variables(1)
            site = ops.call_with_info(ir.create_graph(add_one, v), v)
            if declared:
                site.set_parent_input_modified(v)
            ops.host_store(popxl.d2h_stream((), popxl.float32), v * 2)
        return ir

    popxl.Session(program(declared=False))
    with pytest.raises(
        popart.popart_exception, match="^Inplacing ambiguity detected.* op 'call'.* writes to"
    ):
        popxl.Session(program(declared=True))


def test_copies_of_a_call_write_as_it_does() -> None:
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        v = variables(2)
        inner = ir.create_graph(add_one, v[0])

        def outer(x: popxl.TensorByRef, y: popxl.TensorByRef) -> None:
            ops.call_with_info(inner, x).set_parent_input_modified(x)
            ops.call(inner, y)

        graph, copy = ir.create_graph(outer, *v), ir.create_empty_graph("copy")
        with copy:
            clone_ops(
                graph,
                {
                    t: popxl.graph_input((), popxl.float32, t.name, by_ref=True)
                    for t in graph.inputs
                },
            )
        ops.call(copy, *v)
    assert values(ir, v) == [1, 10]


def test_what_feeds_no_input_cannot_be_declared_written() -> None:
    with popxl.Ir().main_graph as main:
        v = variables(2)
        site = ops.call_with_info(main.ir.create_graph(add_one, v[0]), v[0])
        with pytest.raises(
            ValueError, match="parent_to_graph: got %v1; expected an input of the call"
        ):
            site.set_parent_input_modified(v[1])
