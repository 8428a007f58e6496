"""Conditionals by the API's rules: which branch runs, how inputs map, gradients of both branches,
and refusals.
"""

import numpy as np
import popxl
import pytest
from helpers.addons_programs import run_program
from popxl import ops
from popxl.transforms.autodiff import autodiff

SPEC = popxl.TensorSpec((3,), popxl.float32)
X, Y = np.array([1, 2, 3], np.float32), np.array([4, 5, 6], np.float32)
BOTH = pytest.mark.parametrize("taken", [True, False])


def branches(ir):
    """(then: a * b, else: c + 1)."""
    return ir.create_graph(lambda a, b: a * b, SPEC, SPEC), ir.create_graph(lambda c: c + 1.0, SPEC)


@BOTH
def test_each_branch_has_inputs_of_its_own(taken):
    def build(ir):
        then, other = branches(ir)
        x, y = popxl.variable(X), popxl.variable(Y)
        by_position = ops.conditional(popxl.variable(taken), then, other, [x, y], [y])
        by_name = ops.conditional(
            popxl.variable(np.array([taken])),
            then,
            other,
            then_inputs=[[x]],
            then_inputs_dict={then.inputs[1]: y},
            else_inputs_dict={other.inputs[0]: y},
        )
        return [*by_position, *by_name]

    for result in run_program(build):
        np.testing.assert_array_equal(result, X * Y if taken else Y + 1)


@BOTH
def test_branches_may_lack_inputs_nest_and_return_what_they_are_given(taken):
    def build(ir):
        x, flag, never = popxl.variable(X), popxl.variable(taken), popxl.variable(False)
        fixed = ir.create_graph(lambda: popxl.constant(Y, popxl.float32))
        same = ir.create_graph(lambda t: t, SPEC)

        def nested(inner_flag, t):
            return ops.conditional(inner_flag, fixed, same, else_inputs=[t])

        inner = ir.create_graph(nested, never.spec, SPEC)
        return ops.conditional(flag, inner, fixed, [never, x])

    np.testing.assert_array_equal(run_program(build)[0], X if taken else Y)


@BOTH
def test_a_gradient_reaches_the_inputs_of_the_branch_that_ran_and_is_zero_for_the_others(taken):
    def chosen(flag, a, b, c):
        then, other = branches(popxl.gir())
        (result,) = ops.conditional(flag, then, other, [a, b], [c])
        return result * 2.0

    def build(ir):
        flag, x, y = popxl.variable(taken), popxl.variable(X), popxl.variable(Y)
        graph = ir.create_graph(chosen, flag, x, y, y)
        info = autodiff(graph, grads_required=graph.inputs[1:])
        call = ops.call_with_info(graph, flag, x, y, y)
        return ops.call(info.graph, popxl.constant(X), inputs_dict=info.inputs_dict(call))

    zero = np.zeros(3)
    expected = [2 * X * Y, 2 * X * X, zero] if taken else [zero, zero, 2 * X]
    for got, want in zip(run_program(build), expected):
        np.testing.assert_array_equal(got, want)


def test_a_site_maps_between_its_inputs_and_those_of_the_branches():
    ir = popxl.Ir()
    with ir.main_graph:
        then, other = branches(ir)
        flag, x, y, z = (
            popxl.variable(True),
            popxl.variable(X),
            popxl.variable(Y),
            popxl.variable(Y),
        )
        site = ops.conditional_with_info(flag, then, other, [x, y], [z])
    assert isinstance(site, ops.ConditionalSiteInfo) and site.called_graph == (then, other)
    assert site.inputs == (flag, x, y, z) and len(site.outputs) == 1
    assert [site.graph_to_parent_input_index(i) for i in (0, 1)] == [1, 2]
    assert site.graph_to_parent_input_index(0, then_branch=False) == 3
    assert [site.parent_to_graph_input_index(i) for i in (1, 2, 3)] == [0, 1, 0]
    assert [site.is_parent_index_in_then_branch(i) for i in (1, 2, 3)] == [True, True, False]
    assert (
        site.graph_to_parent_output_index(0)
        == site.parent_to_graph_output_index(0, then_branch=False)
        == 0
    )
    assert [site.graph_to_parent(t) for t in (*then.inputs, *other.inputs)] == [x, y, z]
    assert (
        site.graph_to_parent(then.outputs[0])
        is site.graph_to_parent(other.outputs[0])
        is site.outputs[0]
    )
    assert [site.parent_to_graph(t) for t in (x, y, z)] == [*then.inputs, *other.inputs]
    for call in (
        lambda: site.graph_to_parent_input_index(2),
        lambda: site.graph_to_parent_input_index(1, then_branch=False),
        lambda: site.parent_to_graph_input_index(0),
        lambda: site.parent_to_graph_input_index(4),
        lambda: site.is_parent_index_in_then_branch(0),
        lambda: site.graph_to_parent_output_index(1),
        lambda: site.parent_to_graph_output_index(-1),
    ):
        with pytest.raises(IndexError, match="conditional site: got .* expected"):
            call()
    for call in (site.graph_to_parent, site.parent_to_graph):
        with pytest.raises(ValueError, match="of the branches"):
            call(site.outputs[0])
    with pytest.raises(NotImplementedError, match="Return the new value"):
        site.set_parent_input_modified(x)


def by_reference(t: popxl.TensorByRef):
    ops.add_(t, t)
    return t + 1.0


def test_what_a_conditional_cannot_run_is_refused_in_words():
    ir = popxl.Ir()
    with ir.main_graph:
        then, other = branches(ir)
        flag, x = popxl.variable(True), popxl.variable(X)
        with pytest.raises(TypeError, match="expected a bool scalar"):
            ops.conditional(popxl.variable(1), then, other, [x, x], [x])
        with pytest.raises(ValueError, match="expected a scalar tensor"):
            ops.conditional(popxl.variable(np.array([True, False])), then, other, [x, x], [x])
        with pytest.raises(TypeError, match="got cond = bool; expected a popxl.Tensor"):
            ops.conditional(True, then, other, [x, x], [x])
        with pytest.raises(ValueError, match="input"):
            ops.conditional(flag, then, other, [x], [x])
        short = ir.create_graph(lambda t: t[:2], SPEC)
        with pytest.raises(ValueError, match="expected equal specs"):
            ops.conditional(flag, short, other, [x], [x])
        twice = ir.create_graph(lambda t: (t, t), SPEC)
        with pytest.raises(ValueError, match="expected the same number"):
            ops.conditional(flag, twice, other, [x], [x])
        with pytest.raises(NotImplementedError, match="by-reference inputs"):
            ops.conditional(flag, ir.create_graph(by_reference, SPEC), other, [x], [x])
