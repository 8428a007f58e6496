"""A tensor reaches a graph through the calls in between."""

import numpy as np
import popxl
import popxl_addons as addons
import pytest
from helpers.addons_programs import normal, run_program
from popxl import ops
from popxl.extensions import verify
from popxl_addons.route_tensor import is_subgraph, route_tensor_into_graph

SPEC = popxl.TensorSpec((3,), popxl.float32)


def nested(ir):
    """(outer, middle, inner): outer calls middle twice, middle calls inner in a loop of two."""
    inner = ir.create_graph(lambda x: x * 2, SPEC)
    middle = ir.create_graph(lambda x: ops.repeat(inner, 2, x), SPEC)
    outer = ir.create_graph(lambda x: ops.call(middle, *ops.call(middle, x)), SPEC)
    return outer, middle, inner


def test_a_graph_knows_which_graphs_it_calls_at_any_depth():
    ir = popxl.Ir()
    with ir.main_graph as main:
        outer, middle, inner = nested(ir)
        assert (
            is_subgraph(outer, inner)
            and is_subgraph(middle, inner)
            and not is_subgraph(inner, outer)
        )
        assert not is_subgraph(outer, outer) and not is_subgraph(main, outer)
        ops.call(outer, popxl.variable(np.zeros(3, np.float32)))
        assert is_subgraph(main, inner)


def test_a_routed_tensor_has_the_callers_value_in_every_call_and_iteration():
    def build(ir):
        outer, middle, inner = nested(ir)
        x, y = popxl.variable(normal(3)), popxl.variable(normal(3, seed=1))
        shift = ops.exp(y)
        results = [*ops.call(outer, x), *ops.call(outer, y)]
        with inner:
            local = route_tensor_into_graph(shift)
            ops.add_(inner.outputs[0], local)
        assert local in inner and local.spec == shift.spec
        assert [len(g.inputs) for g in (outer, middle, inner)] == [2, 2, 2]
        assert route_tensor_into_graph(local, inner) is local
        verify(ir)
        return results

    x, y = normal(3), normal(3, seed=1)
    for result, first in zip(run_program(build), (x, y)):
        np.testing.assert_allclose(result, 16 * first + 15 * np.exp(y), rtol=1e-5)


def test_a_tensor_is_routed_into_a_graph_once():
    def build(ir):
        outer, middle, inner = nested(ir)
        x, y = popxl.variable(normal(3)), popxl.variable(normal(3, seed=1))
        results = [*ops.call(outer, x)]
        half = route_tensor_into_graph(y, middle)
        with inner:
            local = route_tensor_into_graph(y)
            ops.add_(inner.outputs[0], local)
            assert route_tensor_into_graph(y) is local and route_tensor_into_graph(x) is not local
        assert (
            route_tensor_into_graph(y, inner) is local
            and route_tensor_into_graph(y, middle) is half
        )
        assert route_tensor_into_graph(half, inner) is not local
        assert [len(g.inputs) for g in (outer, middle, inner)] == [3, 3, 4]
        verify(ir)
        return results

    x, y = normal(3), normal(3, seed=1)
    np.testing.assert_allclose(run_program(build)[0], 16 * x + 15 * y, rtol=1e-5)


def test_a_tensor_that_was_routed_to_be_read_is_written_when_it_is_routed_again():
    def build(ir):
        outer, _, inner = nested(ir)
        count, x = popxl.variable(np.zeros((), np.float32)), popxl.variable(normal(3))
        ops.call(outer, x), ops.call(outer, x)
        read = route_tensor_into_graph(count, inner)
        assert route_tensor_into_graph(count, inner, modified=True) is read
        with inner:
            ops.add_(read, popxl.constant(1.0))
        verify(ir)
        return [count]

    assert run_program(build)[0] == 8


@pytest.mark.parametrize(
    "modified, expected", [(True, 8.0), ([object()], 8.0), (False, 0.0), ([], 0.0)]
)
def test_writes_to_a_routed_tensor_are_seen_where_it_is_declared_modified(modified, expected):
    def build(ir):
        outer, _, inner = nested(ir)
        count, x = popxl.variable(np.zeros((), np.float32)), popxl.variable(normal(3))
        ops.call(outer, x), ops.call(outer, x)
        local = addons.route_tensor_into_graph(count, inner, modified)
        with inner:
            ops.add_(local, popxl.constant(1.0))
        verify(ir)
        return [count]

    assert run_program(build)[0] == expected


def test_a_tensor_is_routed_into_both_branches_of_a_conditional_that_call_the_graph():
    def build(ir):
        doubled, tripled = (
            ir.create_graph(lambda x: x * 2, SPEC),
            ir.create_graph(lambda x: x * 3, SPEC),
        )
        x, shift = popxl.variable(normal(3)), popxl.variable(normal(3, seed=1))
        flags = [popxl.variable(np.array(value)) for value in (True, False)]
        results = []
        for flag in flags:
            for other in (doubled, tripled):
                results += ops.conditional(flag, doubled, other, [x], [x])
        with doubled:
            ops.add_(doubled.outputs[0], route_tensor_into_graph(shift))
        verify(ir)
        with pytest.raises(ValueError, match="a branch of a conditional"):
            route_tensor_into_graph(shift, tripled, modified=True)
        return results

    x, shift = normal(3), normal(3, seed=1)
    expected = [2 * x + shift, 2 * x + shift, 2 * x + shift, 3 * x]
    np.testing.assert_allclose(run_program(build), expected, rtol=1e-6)


def unreachable(outer, inner, foreign):
    return popxl.variable(normal(3)), inner, "which does not call graph 'nested.<lambda>"


def of_another_program(outer, inner, foreign):
    return foreign, inner, "of another Ir, which does not call"


def also_called_elsewhere(outer, inner, foreign):
    outer.ir.create_graph(lambda x: ops.call(inner, x), SPEC)
    return (
        outer.inputs[0],
        inner,
        (
            "which is also called in graph 'also_called_elsewhere.<lambda>.* at .*; expected "
            "calls from graphs"
        ),
    )


def called_before(outer, inner, foreign):
    x = popxl.variable(normal(3))
    ops.call(outer, x)
    made = x + 1
    ops.call(outer, made)
    return made, inner, "before the tensor is made"


@pytest.mark.parametrize(
    "misuse", [unreachable, of_another_program, also_called_elsewhere, called_before]
)
def test_a_tensor_that_cannot_reach_the_graph_is_refused_and_nothing_changes(misuse):
    with popxl.Ir().main_graph:
        foreign = popxl.variable(normal(3))
    ir = popxl.Ir()
    with ir.main_graph:
        outer, middle, inner = nested(ir)
        tensor, graph, words = misuse(outer, inner, foreign)
        with pytest.raises(ValueError, match=words):
            route_tensor_into_graph(tensor, graph)
        assert [len(g.inputs) for g in (outer, middle, inner)] == [1, 1, 1]
        verify(ir)
