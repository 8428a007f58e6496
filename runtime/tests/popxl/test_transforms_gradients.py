"""Gradients by autodiff equal torch's: operands reused or broadcast, views, calls, conditionals,
repeats.
"""

from typing import Any

import popxl
import pytest
import torch
from helpers.gradient_programs import (
    CALLS,
    PLAIN,
    Popxl,
    Program,
    Torch,
    gradients,
    run,
    sample_inputs,
    spec,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from popxl import ops
from popxl.extensions import verify
from popxl.transforms import autodiff

NUMBERS = st.integers(0, 7)
STEPS = st.lists(
    st.tuples(st.sampled_from(PLAIN + CALLS), NUMBERS, NUMBERS), min_size=1, max_size=6
)
PROGRAMS = st.builds(Program, STEPS, st.lists(STEPS, max_size=3))


def check(program: Program, flag: bool = True, last: int = 3) -> None:
    """Differentiate the last values of a program for both of its inputs and compare with torch."""
    ir = popxl.Ir()
    with ir.main_graph:

        def traced(x: popxl.Tensor, w: popxl.Tensor, flag: popxl.Tensor) -> list[popxl.Tensor]:
            return run(Popxl(ir), program, [x, w], flag)[-last:]

        graph = ir.create_graph(traced, spec((2, 3)), spec((3,)), popxl.TensorSpec((), popxl.bool))
    outputs = graph.outputs
    info: Any = autodiff(graph, grads_required=graph.inputs[:2])
    verify(ir)
    values = sample_inputs()
    provided = [
        torch.linspace(-1, 2, t.nelms, dtype=torch.float64).reshape(t.shape) for t in outputs
    ]
    results = gradients(ir, graph, info, [*values, torch.tensor(flag)], provided)
    verify(ir)

    leaves = [t.clone().requires_grad_() for t in values]
    pool = run(Torch(), program, leaves, flag)[-last:]
    loss = sum((t * dy).sum() for t, dy in zip(pool, provided))
    expected = (
        torch.autograd.grad(loss, leaves, materialize_grads=True, allow_unused=True)
        if loss.requires_grad
        else None
    )
    for i, (leaf, result) in enumerate(zip(leaves, results)):
        reference = torch.zeros_like(leaf) if expected is None else expected[i]
        torch.testing.assert_close(result, reference, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(PROGRAMS, st.booleans())
def test_random_programs_have_the_gradients_that_torch_gives(program: Program, flag: bool) -> None:
    check(program, flag)


FUNCTIONS = (
    (("call", 0, 0), ("mul", 0, 1), ("mix", 0, 1)),
    (("mul", 0, 1), ("tanh", 0, 0), ("square", 0, 0), ("turn", 0, 0)),
)


@pytest.mark.quick_every(4)
@pytest.mark.parametrize(
    "steps",
    [
        [("square", 0, 0), ("square", 0, 0), ("mul", 0, 1), ("add", 0, 2)],
        [("mul", 0, 1), ("constant", 0, 0), ("mix", 0, 1), ("rows", 0, 0), ("add", 0, 2)],
        [("detach", 1, 0), ("mul", 0, 2), ("stack", 0, 0), ("mul", 0, 1)],
        [("call", 0, 0), ("mul", 0, 1), ("call", 0, 0), ("call", 1, 0)],
        [("tanh", 1, 0), ("call", 1, 0), ("mul", 0, 1), ("total", 0, 0)],
        [("conditional", 0, 0), ("mul", 0, 1), ("conditional", 1, 0)],
        [("mul", 0, 1), ("repeat", 1, 3), ("mul", 0, 1), ("add", 0, 2)],
        [("repeat", 0, 2), ("conditional", 0, 0), ("call", 1, 0)],
        [("repeat", 0, 0), ("mul", 0, 1)],
    ],
    ids=[
        "reused",
        "broadcast",
        "detached",
        "calls",
        "calls_of_intermediates",
        "conditional",
        "repeat",
        "mixed",
        "repeat_never",
    ],
)
@pytest.mark.parametrize("flag", [True, False])
def test_gradients_equal_those_of_torch(steps: Any, flag: bool) -> None:
    check(Program(steps, FUNCTIONS), flag)


def test_bodies_that_call_graphs_recompute_what_those_calls_gained() -> None:
    functions = (
        (("call", 0, 0), ("mul", 0, 1), ("call", 0, 1)),
        (("tanh", 1, 0), ("mul", 0, 2), ("tanh", 0, 0), ("mul", 0, 1)),
    )
    check(Program([("repeat", 0, 3)], functions))
    check(Program([("conditional", 0, 0), ("call", 1, 1)], functions))


def test_every_carried_value_of_a_loop_passes_gradients_even_where_its_last_value_is_unused() -> (
    None
):
    functions = ((("mul", 0, 1), ("tanh", 1, 0)),)
    check(Program([("repeat", 0, 3), ("total", 1, 0)], functions), last=1)


def differentiate_and_run(
    fn: Any, values: list[torch.Tensor], provided: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Gradients of all inputs of a graph function, for gradients of its outputs."""
    ir = popxl.Ir()
    with ir.main_graph:
        graph = ir.create_graph(fn, *[spec(t.shape) for t in values])
    results = gradients(ir, graph, autodiff(graph), values, provided)
    verify(ir)
    return results


def test_inputs_that_a_loop_does_not_carry_sum_over_iterations() -> None:
    def loop(x: popxl.Tensor, w: popxl.Tensor) -> Any:
        body = popxl.gcg().ir.create_graph(lambda x, w: ops.tanh(ops.mul(x, w)), x, w)
        return ops.repeat(body, 4, x, w)

    x, w = (torch.rand(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    y = x
    for _ in range(4):
        y = torch.tanh(y * w)
    dy = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    results = differentiate_and_run(loop, [x.detach(), w.detach()], [dy])
    torch.testing.assert_close(results, list(torch.autograd.grad(y, (x, w), dy)))


def test_one_tensor_for_two_inputs_of_a_branch_or_a_call_sums_both_gradients() -> None:
    def twice(x: popxl.Tensor) -> Any:
        ir = popxl.gcg().ir
        product = ir.create_graph(lambda a, b: ops.mul(ops.sin(a), b), x, x)
        either = ops.conditional(
            ops.greater(ops.sum(x), ops.sum(ops.negate(x))), product, product, [x, x], [x, x]
        )
        return ops.add(either[0], ops.call(product, x, x)[0])

    x = torch.rand(3, dtype=torch.float64)
    [dx] = differentiate_and_run(twice, [x], [torch.ones(3, dtype=torch.float64)])
    torch.testing.assert_close(dx, 2 * (x.cos() * x + x.sin()))


def test_an_output_that_a_called_graph_returns_twice_gets_both_gradients() -> None:
    def both(x: popxl.Tensor) -> Any:
        def body(x: popxl.Tensor) -> Any:
            y = ops.sin(x)
            return y, y

        first, second = ops.call(popxl.gcg().ir.create_graph(body, x), x)
        return ops.add(first, ops.mul(second, second))

    x = torch.rand(3, dtype=torch.float64)
    [dx] = differentiate_and_run(both, [x], [torch.ones(3, dtype=torch.float64)])
    torch.testing.assert_close(dx, x.cos() + 2 * x.sin() * x.cos())
