"""Graphs that round from a seed: the same bits wherever and whenever they are called with it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import popxl
import pytest
import torch
from helpers.rounding_programs import (
    PROGRAMS,
    SEEDS,
    SIZE,
    SMALL,
    Program,
    add_little,
    beside_others,
    elsewhere,
    from_the_device,
    in_a_loop,
    like,
    new_ir,
    once,
    saving,
    seed_spec,
    seeded,
    update,
    updating,
    with_a_loop,
)
from popxl import extensions, ops
from popxl.errors import GraphError
from popxl.opdef import OPS
from popxl.ops import collectives, var_updates
from popxl.tensor import Variable
from popxl_addons.module import Module
from popxl_addons.optimizers import AdamOptimizerStep
from popxl_addons.transforms.autodiff import autodiff_with_accumulation
from popxl_engine.kernels.registry import kernel_for
from popxl_engine.machine.rng_path import as_seed, enter, of_run, of_seed
from popxl_engine.stochastic import rounded

both = pytest.mark.parametrize("interpret", ["0", "1"])


def built(
    program: Program, words: Sequence[int] = SEEDS[0], stochastic: bool = True
) -> tuple[popxl.Ir, Variable]:
    ir = new_ir(stochastic=stochastic)
    with ir.main_graph:
        v = popxl.variable(np.ones(SIZE, np.float32), popxl.bfloat16, name="v")
        program(v, popxl.variable(words, popxl.uint32, name="seed"))
    extensions.verify(ir)
    return ir, v


def after(
    program: Program, words: Sequence[int] = SEEDS[0], runs: int = 1, count: int = 0
) -> np.ndarray:
    """The variable after some runs, the first of which has the given number."""
    ir, v = built(program, words)
    with popxl.Session(ir) as session:
        extensions.set_run_count(session, count)
        for _ in range(runs):
            session.run()
        return session.get_tensor_data(v)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_engine_rounds_as_the_interpreter_does(program: Program, monkeypatch: Any) -> None:
    found = after(program, runs=2)
    monkeypatch.setenv("POPXL_INTERPRET", "1")
    np.testing.assert_array_equal(found, after(program, runs=2))
    assert len(np.unique(found)) > 1


@pytest.mark.quick_every(7)
@both
@pytest.mark.parametrize("program", [p for p in PROGRAMS if p is not beside_others])
def test_bits_follow_from_the_seed_and_not_from_the_run(
    program: Program, interpret: str, monkeypatch: Any
) -> None:
    monkeypatch.setenv("POPXL_INTERPRET", interpret)
    expected = after(program)
    np.testing.assert_array_equal(after(program, count=5), expected)
    assert not np.array_equal(after(program, SEEDS[1]), expected)


def drawn(*places: int) -> np.ndarray:
    """Ones after updates that draw at these places."""
    x, little = torch.ones(SIZE, dtype=torch.bfloat16), torch.full((SIZE,), SMALL)
    for place in places:
        with rounded((place, 0)):
            kernel_for(OPS["accumulate_"])(x, little, None)
    return x.to(torch.float32).numpy()


@both
def test_a_seed_stands_where_else_the_place_in_the_run_stands(
    interpret: str, monkeypatch: Any
) -> None:
    monkeypatch.setenv("POPXL_INTERPRET", interpret)
    words = [int(n) for n in SEEDS[0]]

    def unseeded(v: popxl.Tensor, seed: popxl.Tensor) -> None:
        update(v, seed)

    seed, run = of_seed(words), of_run(7)
    np.testing.assert_array_equal(after(once), drawn(enter(seed, (0,)), enter(seed, (1,))))
    np.testing.assert_array_equal(
        after(unseeded, count=7), drawn(enter(run, (0,)), enter(run, (1,)))
    )
    assert of_seed(words) != of_seed(words[::-1])
    assert as_seed(of_seed(words)) != tuple(words)


def test_loops_go_on_from_the_seed_of_the_graph_that_they_are_in() -> None:
    seed = of_seed([int(n) for n in SEEDS[0]])
    inside = [enter(seed, (1, i, position)) for i in range(3) for position in range(2)]
    np.testing.assert_array_equal(after(with_a_loop), drawn(enter(seed, (0,)), *inside))


def test_the_innermost_seed_counts() -> None:
    def both_ways(outer_words: Sequence[int]) -> np.ndarray:
        def program(v: popxl.Tensor, seed: popxl.Tensor) -> None:
            def outer(x: popxl.TensorByRef, inner_seed: popxl.Tensor, seed: popxl.Tensor) -> None:
                ops.call(updating(v), x, inner_seed)

            graph = seeded(outer, like(v), seed_spec(), seed_spec())
            ops.call(graph, v, seed, popxl.constant(outer_words, popxl.uint32))

        return after(program)

    np.testing.assert_array_equal(both_ways(SEEDS[1]), after(once))
    np.testing.assert_array_equal(both_ways(SEEDS[2]), after(once))


@both
def test_steps_in_one_run_in_several_runs_and_elsewhere_give_the_same_bits(
    interpret: str, monkeypatch: Any
) -> None:
    monkeypatch.setenv("POPXL_INTERPRET", interpret)
    expected = after(in_a_loop)
    np.testing.assert_array_equal(after(saving, runs=3), expected)
    np.testing.assert_array_equal(after(elsewhere, count=3), expected)


def test_each_update_of_a_graph_draws_apart() -> None:
    ir = new_ir()
    with ir.main_graph:
        seed = popxl.constant(SEEDS[0], popxl.uint32)

        def several(x: popxl.TensorByRef, y: popxl.TensorByRef, seed: popxl.Tensor) -> None:
            add_little(x)
            add_little(y)

        variables = [popxl.variable(np.ones(SIZE, np.float32), popxl.bfloat16) for _ in range(4)]
        graph = seeded(several, *map(like, variables[:2]), seed_spec())
        ops.call(graph, *variables[:2], seed)
        ops.call(graph, *variables[2:], seed)
    with popxl.Session(ir) as session:
        session.run()
        a, b, c, d = session.get_tensors_data(variables).values()
    assert not np.array_equal(a, b)
    np.testing.assert_array_equal(c, a)
    np.testing.assert_array_equal(d, b)


def test_without_stochastic_rounding_a_seed_has_no_effect() -> None:
    ir, v = built(from_the_device, stochastic=False)
    with popxl.Session(ir) as session:
        session.run()
        assert (session.get_tensor_data(v) == 1).all()
        assert "downloaded" not in session._engine.program.source.text(), "nobody waits for a seed"


def test_a_seed_on_the_device_is_waited_for_once_a_call_and_can_be_planned() -> None:
    ir, v = built(from_the_device)
    with popxl.Session(ir) as session:
        assert session._engine.program.source.text().count("= downloaded") == 1
    assert extensions.plan(built(from_the_device)[0]).phases


def test_a_profiled_run_gives_the_same_bits() -> None:
    ir, v = built(in_a_loop)
    with popxl.Session(ir) as session, extensions.profile(session):
        session.run()
        found = session.get_tensor_data(v)
    np.testing.assert_array_equal(found, after(in_a_loop))


# Fused updates


def adamw(
    shards: bool, steps: int, runs: int, weight: popxl.dtype, moments: popxl.dtype
) -> list[np.ndarray]:
    """A variable and its moments after some runs of some steps of AdamW each, with a seed split off
    for each step.
    """
    data, gradient = np.random.default_rng(0).normal(size=(2, 70_003)).astype(np.float32)
    ir = new_ir(4 if shards else 1)
    with ir.main_graph:
        given = popxl.constant(gradient)
        if shards:
            v, target = popxl.replica_sharded_variable(data, weight)
            given = collectives.replica_sharded_slice(given)
        else:
            v = target = popxl.variable(data, weight)
        facts, step = AdamOptimizerStep().create_graph(
            target, given, lr=1e-3, eps=1e-2, first_order_dtype=moments, second_order_dtype=moments
        )
        with step.graph:
            own = popxl.graph_input((2,), popxl.uint32, "seed")
        extensions.round_from(step.graph, own)
        state = facts.init()
        seed = popxl.variable(SEEDS[0], popxl.uint32, name="seed")
        body = ir.create_empty_graph("steps")
        with body:
            carried = popxl.graph_input((2,), popxl.uint32, "seed")
            mine, following = ops.split_random_seed(carried)
            outside = {own: mine}
            inputs: dict[popxl.Tensor, popxl.Tensor] = {}
            named = {step.args[name]: t for name, t in state.to_dict().items()}
            for inner, t in {
                step.graph.inputs[0]: target,
                step.graph.inputs[1]: given,
                **named,
            }.items():
                by_ref = inner in step.graph._by_ref_inputs
                outside[inner] = popxl.graph_input(
                    t.shape, t.dtype, t.name, by_ref, t.meta_shape or None
                )
                inputs[outside[inner]] = t
            ops.call(step.graph, inputs_dict=outside)
            popxl.graph_output(following)
        (left,) = ops.repeat(body, steps, seed, inputs_dict=inputs)
        var_updates.copy_var_update_(seed, left)
    found = {t.name: t for t in ir.main_graph.variables}
    with popxl.Session(ir) as session:
        for _ in range(runs):
            session.run()
        return [
            session.get_tensor_data(t) for t in (v, found["first_order"], found["second_order"])
        ]


weights = pytest.mark.parametrize(
    "weight", [popxl.bfloat16, popxl.float32], ids=["bfloat16", "float32"]
)


@weights
def test_fused_updates_draw_from_the_seed(weight: popxl.dtype, monkeypatch: Any) -> None:
    monkeypatch.setattr("popxl_engine.kernels.adamw.CHUNK", 640)
    expected = adamw(False, 3, 1, weight, popxl.bfloat16)
    for other in (
        adamw(False, 1, 3, weight, popxl.bfloat16),
        adamw(True, 3, 1, weight, popxl.bfloat16),
    ):
        for a, b in zip(expected, other):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shards", [False, True])
@weights
def test_fused_moments_round_as_the_interpreter_rounds_them(
    shards: bool, weight: popxl.dtype, monkeypatch: Any
) -> None:
    fused = adamw(shards, 2, 1, weight, popxl.bfloat16)
    monkeypatch.setenv("POPXL_INTERPRET", "1")
    plain = adamw(shards, 2, 1, weight, popxl.bfloat16)
    # Sums that differ in the last bit of float32 are rounded apart once in some 2**13; other draws,
    # every third.
    assert all((a != b).mean() < 1e-3 for a, b in zip(fused[1:], plain[1:]))
    # Unfused, what is subtracted from a weight of 16 bits has 16 bits itself: half a unit of it is
    # rounded apart, too.
    assert weight is popxl.float32 or (fused[0] != plain[0]).mean() < 1e-2


# Carried and shown


class Scaled(Module):
    """A product whose gradient rounds from the seed that the forward graph takes."""

    def build(self, x: popxl.Tensor, seed: popxl.Tensor) -> popxl.Tensor:
        self.aux["x"], self.aux["seed"] = x, seed
        return x * self.add_variable_input("w", lambda: np.ones(SIZE), popxl.bfloat16)

    def build_grad(self, dy: popxl.Tensor) -> None:
        extensions.round_from(popxl.gcg(), self.aux["seed"])
        self.var_grad["w"] = dy * self.aux["x"]


def test_a_gradient_with_accumulators_keeps_the_seed() -> None:
    ir = new_ir()
    with ir.main_graph:
        x = popxl.TensorSpec((SIZE,), popxl.bfloat16)
        _, graph = Scaled().create_graph(x, seed_spec())
        _, accumulating = autodiff_with_accumulation(
            graph, graph.args.tensors, [graph.graph.outputs[0]], []
        )
    seed = accumulating.graph.rounding_seed
    assert seed is not None
    assert seed in accumulating.graph.inputs
    extensions.verify(ir)


def test_the_text_of_a_graph_names_the_seed() -> None:
    ir, _ = built(once)
    (graph,) = (g for g in ir.graphs if g.rounding_seed is not None)
    assert extensions.to_text(graph).splitlines()[0].endswith("-> (), rounding from %seed")


# Refusals


def refused(says: str, make: Callable[[popxl.Graph], Any], error: type = ValueError) -> None:
    def fn(
        x: popxl.TensorByRef, words: popxl.TensorByRef, seed: popxl.Tensor, number: popxl.Tensor
    ) -> None:
        add_little(x)

    ir = new_ir()
    with ir.main_graph:
        popxl.variable(1) + 1
        graph = ir.create_graph(
            fn, popxl.TensorSpec((4,), popxl.bfloat16), seed_spec(), seed_spec(), seed_spec()
        )
        with pytest.raises(error, match=says):
            make(graph)
    assert graph.rounding_seed is None


def test_only_an_input_of_the_graph_is_taken() -> None:
    seed = popxl.TensorSpec((2,), popxl.uint32)
    says = r"round_from: got .*; expected an input of graph 'refused.fn_subgraph\(0\)'\. Make one there: popxl\.graph"
    refused(says, lambda graph: extensions.round_from(graph, popxl.constant([1, 2], popxl.uint32)))
    refused(says, lambda graph: extensions.round_from(graph, seed))
    refused(says, lambda graph: extensions.round_from(graph, graph.constants[0]))


def test_only_two_words_are_taken() -> None:
    def make(graph: popxl.Graph, shape: tuple[int, ...], dtype: popxl.dtype) -> None:
        with graph:
            extensions.round_from(graph, popxl.graph_input(shape, dtype, "other"))

    says = r"round_from: got %other: {} of graph .*; expected uint32\[2\]\. Make one with"
    refused(says.format(r"uint32\[3\]"), lambda graph: make(graph, (3,), popxl.uint32))
    refused(says.format(r"uint32\[4, 2\]"), lambda graph: make(graph, (4, 2), popxl.uint32))
    refused(says.format(r"int32\[2\]"), lambda graph: make(graph, (2,), popxl.int32))


def test_an_input_by_reference_is_not_taken() -> None:
    says = r"round_from: got %words of graph .*, an input by reference; expected one by value\. Annotate"
    refused(says, lambda graph: extensions.round_from(graph, graph.inputs[1]))


def test_a_program_with_a_session_takes_no_seed() -> None:
    def late(graph: popxl.Graph) -> None:
        popxl.Session(graph.ir)
        extensions.round_from(graph, graph.inputs[2])

    refused("round_from: got a change to Ir .* after a Session was made", late, RuntimeError)


def test_verify_finds_a_seed_that_has_become_a_reference() -> None:
    ir, _ = built(once)
    (graph,) = (g for g in ir.graphs if g.rounding_seed is not None)
    graph._by_ref_inputs.add(graph.inputs[1])
    with pytest.raises(
        GraphError, match="verify: got %seed as the seed that graph .* rounds from; expected one"
    ):
        extensions.verify(ir)
