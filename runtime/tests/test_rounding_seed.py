"""Graphs that round from a seed: the same bits wherever and whenever they are called with it."""

from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np
import popxl
import pytest
import torch
from popxl import extensions, ops
from popxl.errors import GraphError
from popxl.opdef import OPS
from popxl.ops import collectives, var_updates
from popxl.tensor import Variable
from popxl_addons.module import Module
from popxl_addons.optimizers import AdamOptimizerStep
from popxl_addons.transforms.autodiff import autodiff_with_accumulation
from popxl_engine.kernels.registry import kernel_for
from popxl_engine.machine.place import as_seed, enter, of_run, of_seed
from popxl_engine.stochastic import rounded

SIZE = 256
SMALL = 2.0**-9
"""Lost when it is added to 1 in bfloat16 and rounded to nearest; rounded stochastically it counts every fourth time."""
SEEDS = popxl.create_seeds(42, batches_per_step=8)


def new_ir(replicas: int = 1, stochastic: bool = True) -> popxl.Ir:
    ir = popxl.Ir(replicas)
    ir._pb_ir.getSessionOptions().enableStochasticRounding = stochastic
    return ir


def add_little(x: popxl.Tensor) -> None:
    var_updates.accumulate_(x, popxl.constant(np.full(x.shape, SMALL, np.float32)))


def update(x: popxl.TensorByRef, seed: popxl.Tensor) -> None:
    """Two updates, so that both have to draw apart."""
    add_little(x)
    add_little(x)


def like(v: popxl.Tensor) -> popxl.TensorSpec:
    return popxl.TensorSpec(v.shape, v.dtype, v.meta_shape)


def seed_spec() -> popxl.TensorSpec:
    return popxl.TensorSpec((2,), popxl.uint32)


def seeded(fn: Callable[..., Any], *inputs: Any, seed: int = -1) -> popxl.Graph:
    """A graph of a function that rounds from one of its inputs."""
    graph = popxl.gcg().ir.create_graph(fn, *inputs)
    extensions.round_from(graph, graph.inputs[seed])
    return graph


def updating(v: popxl.Tensor) -> popxl.Graph:
    """The seeded graph of two updates of a tensor like v."""
    return seeded(update, like(v), seed_spec())


def split_each_time(seed: popxl.Tensor, x: popxl.TensorByRef, graph: "Held") -> popxl.Tensor:
    """A loop's body: call the graph with a seed of its own."""
    own, following = ops.split_random_seed(seed)
    ops.call(graph.graph, x, own)
    return following


class Held:
    """A graph among the arguments of a graph function."""

    def __init__(self, graph: popxl.Graph):
        self.graph = graph


# Programs: what they do with a variable of ones and a seed


def once(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    ops.call(updating(v), v, seed)


def twice(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    graph = updating(v)
    for own in ops.split_random_seed(seed):
        ops.call(graph, v, own)


def in_a_loop(v: popxl.Tensor, seed: popxl.Tensor, count: int = 3) -> popxl.Tensor:
    body = popxl.gcg().ir.create_graph(split_each_time, seed_spec(), like(v), Held(updating(v)))
    return ops.repeat(body, count, seed, v)[0]


def in_a_loop_of_one(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    in_a_loop(v, seed, 1)


def as_the_body(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    def body(seed: popxl.Tensor, x: popxl.TensorByRef) -> popxl.Tensor:
        add_little(x)
        return ops.split_random_seed(seed)[1]

    ops.repeat(seeded(body, seed_spec(), like(v), seed=0), 3, seed, v)


def with_a_loop(v: popxl.Tensor, seed: popxl.Tensor, count: int = 3) -> None:
    """A loop that carries the seed from which it draws."""

    def body(seed: popxl.Tensor, x: popxl.TensorByRef) -> popxl.Tensor:
        add_little(x)
        add_little(x)
        return ops.split_random_seed(seed)[1]

    def outer(x: popxl.TensorByRef, seed: popxl.Tensor) -> None:
        add_little(x)
        ops.repeat(popxl.gcg().ir.create_graph(body, seed_spec(), like(v)), count, seed, x)

    ops.call(seeded(outer, like(v), seed_spec()), v, seed)


def with_a_loop_of_one(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    with_a_loop(v, seed, 1)


def with_a_loop_that_ends_the_seed(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    """Nobody else needs the seed, so that the program may drop it when the loop begins."""
    with_a_loop(v, ops.split_random_seed(seed)[1])


def with_a_call(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    def outer(x: popxl.TensorByRef, seed: popxl.Tensor) -> None:
        plain = popxl.gcg().ir.create_graph(update, like(v), seed_spec())
        add_little(x)
        ops.call(plain, x, seed)
        ops.call(plain, x, seed)

    ops.call(seeded(outer, like(v), seed_spec()), v, seed)


def nested(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    def outer(x: popxl.TensorByRef, inner_seed: popxl.Tensor, seed: popxl.Tensor) -> None:
        inner = updating(v)
        add_little(x)
        ops.call(inner, x, inner_seed)
        add_little(x)
        ops.call(inner, x, seed)
        add_little(x)

    one, other = ops.split_random_seed(seed)
    ops.call(seeded(outer, like(v), seed_spec(), seed_spec()), v, one, other)


def branching(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    """A branch in a seeded graph, one of its sides with a seed of its own."""

    def side(x: popxl.Tensor, seed: popxl.Tensor) -> popxl.Tensor:
        add_little(x)
        return x

    def outer(x: popxl.TensorByRef, seed: popxl.Tensor) -> None:
        ir, (own, _) = popxl.gcg().ir, ops.split_random_seed(seed)
        plain, other = ir.create_graph(side, like(v), seed_spec()), seeded(side, like(v), seed_spec())
        for taken in (True, False):
            condition = popxl.constant(taken, popxl.bool)
            (y,) = ops.conditional(condition, plain, other, [x, seed], [x, own])
            var_updates.copy_var_update_(x, y)

    ops.call(seeded(outer, like(v), seed_spec()), v, seed)


def of_which_the_seed_changes(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    """The graph writes to its input before it draws; its caller writes to the seed after a call."""

    def changing(x: popxl.TensorByRef, seed: popxl.Tensor) -> popxl.Tensor:
        add_little(x)
        ops.add_(seed, popxl.constant([1, 1], popxl.uint32))
        add_little(x)
        return seed

    graph = seeded(changing, like(v), seed_spec())
    (changed,) = ops.call(graph, v, seed)
    ops.add_(seed, popxl.constant([2, 2], popxl.uint32))
    ops.call(graph, v, changed)
    ops.call(graph, v, seed)


def with_views(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    """Updates through views, one of which memory cannot give."""

    def viewing(x: popxl.TensorByRef, seed: popxl.Tensor) -> None:
        rows = x.reshape_((16, SIZE // 16))
        add_little(rows)
        add_little(rows.transpose_().reshape_((SIZE,)))
        add_little(x)

    ops.call(seeded(viewing, like(v), seed_spec()), v, seed)


def on_the_device(seed: popxl.Tensor) -> popxl.Tensor:
    """A seed that only the device can compute."""
    words = ops.cast(ops.cast(seed, popxl.int32), popxl.float32)
    return ops.cast(ops.cast(words, popxl.int32), popxl.uint32)


def from_the_device(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    in_a_loop(v, on_the_device(seed))


def of_which_a_seed_on_the_device_changes(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    of_which_the_seed_changes(v, on_the_device(seed))


def beside_others(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    """Updates that draw from the run around one that draws from a seed."""
    add_little(v)
    ops.call(updating(v), v, seed)
    add_little(v)


PROGRAMS = [
    once,
    twice,
    in_a_loop,
    in_a_loop_of_one,
    as_the_body,
    with_a_loop,
    with_a_loop_of_one,
    with_a_loop_that_ends_the_seed,
    with_a_call,
    nested,
    branching,
    of_which_the_seed_changes,
    with_views,
    from_the_device,
    of_which_a_seed_on_the_device_changes,
    beside_others,
]
Program = Callable[[popxl.Tensor, popxl.Tensor], Any]
both = pytest.mark.parametrize("interpret", ["0", "1"])


def built(program: Program, words: Sequence[int] = SEEDS[0], stochastic: bool = True) -> Tuple[popxl.Ir, Variable]:
    ir = new_ir(stochastic=stochastic)
    with ir.main_graph:
        v = popxl.variable(np.ones(SIZE, np.float32), popxl.bfloat16, name="v")
        program(v, popxl.variable(words, popxl.uint32, name="seed"))
    extensions.verify(ir)
    return ir, v


def after(program: Program, words: Sequence[int] = SEEDS[0], runs: int = 1, count: int = 0) -> np.ndarray:
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


@both
@pytest.mark.parametrize("program", [p for p in PROGRAMS if p is not beside_others])
def test_bits_follow_from_the_seed_and_not_from_the_run(program: Program, interpret: str, monkeypatch: Any) -> None:
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
def test_a_seed_stands_where_else_the_place_in_the_run_stands(interpret: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("POPXL_INTERPRET", interpret)
    words = [int(n) for n in SEEDS[0]]

    def unseeded(v: popxl.Tensor, seed: popxl.Tensor) -> None:
        update(v, seed)

    seed, run = of_seed(words), of_run(7)
    np.testing.assert_array_equal(after(once), drawn(enter(seed, (0,)), enter(seed, (1,))))
    np.testing.assert_array_equal(after(unseeded, count=7), drawn(enter(run, (0,)), enter(run, (1,))))
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


def saving(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    """One iteration of `in_a_loop`; the seed for the next is kept."""
    var_updates.copy_var_update_(seed, in_a_loop(v, seed, 1))


def elsewhere(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    """`in_a_loop` after other updates, and inside another call and another loop."""
    other = popxl.variable(np.ones(SIZE, np.float32), popxl.bfloat16, name="other")
    add_little(other)

    def around(x: popxl.TensorByRef, y: popxl.TensorByRef, seed: popxl.Tensor) -> None:
        add_little(y)
        in_a_loop(x, seed)

    graph = popxl.gcg().ir.create_graph(around, like(v), like(other), seed_spec())
    ops.repeat(graph, 1, v, other, seed)


@both
def test_steps_in_one_run_in_several_runs_and_elsewhere_give_the_same_bits(interpret: str, monkeypatch: Any) -> None:
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


def adamw(shards: bool, steps: int, runs: int, weight: popxl.dtype, moments: popxl.dtype) -> List[np.ndarray]:
    """A variable and its moments after some runs of some steps of AdamW each, with a seed split off for each step."""
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
            inputs: Dict[popxl.Tensor, popxl.Tensor] = {}
            named = {step.args[name]: t for name, t in state.to_dict().items()}
            for inner, t in {step.graph.inputs[0]: target, step.graph.inputs[1]: given, **named}.items():
                by_ref = inner in step.graph._by_ref_inputs
                outside[inner] = popxl.graph_input(t.shape, t.dtype, t.name, by_ref, t.meta_shape or None)
                inputs[outside[inner]] = t
            ops.call(step.graph, inputs_dict=outside)
            popxl.graph_output(following)
        (left,) = ops.repeat(body, steps, seed, inputs_dict=inputs)
        var_updates.copy_var_update_(seed, left)
    found = {t.name: t for t in ir.main_graph.variables}
    with popxl.Session(ir) as session:
        for _ in range(runs):
            session.run()
        return [session.get_tensor_data(t) for t in (v, found["first_order"], found["second_order"])]


weights = pytest.mark.parametrize("weight", [popxl.bfloat16, popxl.float32], ids=["bfloat16", "float32"])


@weights
def test_fused_updates_draw_from_the_seed(weight: popxl.dtype, monkeypatch: Any) -> None:
    monkeypatch.setattr("popxl_engine.rewrites.adam.CHUNK", 640)
    expected = adamw(False, 3, 1, weight, popxl.bfloat16)
    for other in (adamw(False, 1, 3, weight, popxl.bfloat16), adamw(True, 3, 1, weight, popxl.bfloat16)):
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
    # Sums that differ in the last bit of float32 are rounded apart once in some 2**13; other draws, every third.
    assert all((a != b).mean() < 1e-3 for a, b in zip(fused[1:], plain[1:]))
    # Unfused, what is subtracted from a weight of 16 bits has 16 bits itself: half a unit of it is rounded apart, too.
    assert weight is popxl.float32 or (fused[0] != plain[0]).mean() < 1e-2


# Carried and shown


class Scaled(Module):
    """A product whose gradient rounds from the seed that the forward graph takes."""

    def build(self, x: popxl.Tensor, seed: popxl.Tensor) -> popxl.Tensor:
        self.aux.x, self.aux.seed = x, seed
        return x * self.add_variable_input("w", lambda: np.ones(SIZE), popxl.bfloat16)

    def build_grad(self, dy: popxl.Tensor) -> None:
        extensions.round_from(popxl.gcg(), self.aux.seed)
        self.var_grad.w = dy * self.aux.x


def test_a_gradient_with_accumulators_keeps_the_seed() -> None:
    ir = new_ir()
    with ir.main_graph:
        x = popxl.TensorSpec((SIZE,), popxl.bfloat16)
        _, graph = Scaled().create_graph(x, seed_spec())
        _, accumulating = autodiff_with_accumulation(graph, graph.args.tensors, [graph.graph.outputs[0]], [])
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
    def fn(x: popxl.TensorByRef, words: popxl.TensorByRef, seed: popxl.Tensor, number: popxl.Tensor) -> None:
        add_little(x)

    ir = new_ir()
    with ir.main_graph:
        popxl.variable(1) + 1
        graph = ir.create_graph(fn, popxl.TensorSpec((4,), popxl.bfloat16), seed_spec(), seed_spec(), seed_spec())
        with pytest.raises(error, match=says):
            make(graph)
    assert graph.rounding_seed is None


def test_only_an_input_of_the_graph_is_taken() -> None:
    seed = popxl.TensorSpec((2,), popxl.uint32)
    says = r"round_from: got .*; expected an input of graph 'fn_subgraph\(0\)'\. Make one there: popxl\.graph_input"
    refused(says, lambda graph: extensions.round_from(graph, popxl.constant([1, 2], popxl.uint32)))
    refused(says, lambda graph: extensions.round_from(graph, seed))
    refused(says, lambda graph: extensions.round_from(graph, graph.constants[0]))


def test_only_two_words_are_taken() -> None:
    def make(graph: popxl.Graph, shape: Tuple[int, ...], dtype: popxl.dtype) -> None:
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
    with pytest.raises(GraphError, match="verify: got %seed as the seed that graph .* rounds from; expected one"):
        extensions.verify(ir)
