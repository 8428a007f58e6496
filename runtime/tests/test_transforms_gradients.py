"""Gradients by autodiff equal torch's: operands reused or broadcast, views, calls, conditionals, repeats."""

from typing import Any, List

import popxl
import pytest
import torch
from gradient_programs import CALLS, PLAIN, Popxl, Program, Torch, gradients, run, sample_inputs, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from popxl.extensions import verify
from popxl.transforms import autodiff

NUMBERS = st.integers(0, 7)
STEPS = st.lists(st.tuples(st.sampled_from(PLAIN + CALLS), NUMBERS, NUMBERS), min_size=1, max_size=6)
PROGRAMS = st.builds(Program, STEPS, st.lists(STEPS, max_size=3))


def check(program: Program, flag: bool = True) -> None:
    """Differentiate the last three values of a program for both of its inputs and compare with torch."""
    ir = popxl.Ir()
    with ir.main_graph:

        def traced(x: popxl.Tensor, w: popxl.Tensor, flag: popxl.Tensor) -> List[popxl.Tensor]:
            return run(Popxl(ir), program, [x, w], flag)[-3:]

        graph = ir.create_graph(traced, spec((2, 3)), spec((3,)), popxl.TensorSpec((), popxl.bool))
    outputs = list(dict.fromkeys(graph.outputs))
    info: Any = autodiff(graph, grads_required=graph.inputs[:2])
    verify(ir)
    values = sample_inputs()
    provided = [torch.linspace(-1, 2, t.nelms, dtype=torch.float64).reshape(t.shape) for t in outputs]
    results = gradients(ir, graph, info, [*values, torch.tensor(flag)], provided)
    verify(ir)

    leaves = [t.clone().requires_grad_() for t in values]
    pool = list(dict.fromkeys(run(Torch(), program, leaves, flag)[-3:]))
    loss = sum((t * dy).sum() for t, dy in zip(pool, provided))
    expected = (
        torch.autograd.grad(loss, leaves, materialize_grads=True, allow_unused=True) if loss.requires_grad else None
    )
    for i, (leaf, result) in enumerate(zip(leaves, results)):
        reference = torch.zeros_like(leaf) if expected is None else expected[i]
        torch.testing.assert_close(result, reference, rtol=1e-9, atol=1e-9)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(PROGRAMS, st.booleans())
def test_random_programs_have_the_gradients_that_torch_gives(program: Program, flag: bool) -> None:
    check(program, flag)


FUNCTIONS = (
    (("call", 0, 0), ("mul", 0, 1), ("mix", 0, 1)),
    (("mul", 0, 1), ("tanh", 0, 0), ("square", 0, 0), ("turn", 0, 0)),
)


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
