"""Writes in place whose order nothing fixes are refused when a Session is made; every ordered
program is accepted.
"""

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import popart
import popxl
import popxl_addons as addons
import pytest
import torch
from popxl import ops
from popxl.context import ExecutionContext, _execution_context
from popxl.transforms import ambiguity
from popxl.transforms.clone import clone_ops
from popxl.transforms.op_order import OpOrder, Steps
from popxl_addons.optimizers import AdamOptimizerStep

Build = Callable[[popxl.Ir, Any], None]
ONES = np.ones((4, 4), np.float32)


def made(build: Build, sequence: bool = False) -> popxl.Ir:
    """The program of ``build(ir, variable)``."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence(True if sequence else "pass"):
        build(ir, popxl.variable(ONES, name="v"))
    return ir


def store(t: popxl.Tensor) -> None:
    ops.host_store(popxl.d2h_stream(t.shape, t.dtype), t)


def bump(x: popxl.TensorByRef) -> None:
    ops.add_(x, popxl.constant(ONES))


def read_then_write(ir: popxl.Ir, v: Any) -> None:
    store(v)
    ops.add_(v, popxl.constant(ONES))


def write_then_read(ir: popxl.Ir, v: Any) -> None:
    ops.add_(v, popxl.constant(ONES))
    store(v * 2)


def two_writes(ir: popxl.Ir, v: Any) -> None:
    v += 1
    v += 2


def far_apart(ir: popxl.Ir, v: Any) -> None:
    x = v * 2
    for _ in range(50):
        x = ops.sin(x)
    ops.var_updates.copy_var_update_(v, popxl.constant(ONES))
    store(x)


def through_a_view(ir: popxl.Ir, v: Any) -> None:
    ops.add_(v.reshape_((16,)), popxl.constant(np.ones(16, np.float32)))
    store(v + 1)


def through_a_join(ir: popxl.Ir, v: Any) -> None:
    w = popxl.variable(ONES)
    both = ops.concat_([v, w])
    ops.add_(both, popxl.constant(np.ones((8, 4), np.float32)))
    store(w + 1)


def through_overlapping_slices(ir: popxl.Ir, v: Any) -> None:
    ops.add_(ops.slice_(v, 0, 3), popxl.constant(np.ones((3, 4), np.float32)))
    store(ops.slice_(v, 2, 4))


def through_a_slice(ir: popxl.Ir, v: Any) -> None:
    ops.add_(ops.slice_(v, 0, 3), popxl.constant(np.ones((3, 4), np.float32)))
    store(v)


def through_the_whole(ir: popxl.Ir, v: Any) -> None:
    store(ops.slice_(v, 2, 4))
    bump(v)


def bump_and_return(x: popxl.TensorByRef) -> popxl.Tensor:
    return ops.add_(x, popxl.constant(ONES))


def bump_and_return_a_view(x: popxl.TensorByRef, y: popxl.Tensor) -> tuple[popxl.Tensor, ...]:
    bump(x)
    return y * 2, x.reshape_((16,))


def through_calls(ir: popxl.Ir, v: Any) -> None:
    graph = ir.create_graph(bump_and_return, v)
    ops.call(graph, v)
    ops.call(graph, v)


def through_a_call_that_returns_a_view(ir: popxl.Ir, v: Any) -> None:
    ops.call(ir.create_graph(bump_and_return_a_view, v, v), v, v * 1)
    store(v)


def through_a_call_that_is_declared_to_write(ir: popxl.Ir, v: Any) -> None:
    def body(x: popxl.Tensor) -> popxl.Tensor:
        return ops.add_(x, popxl.constant(ONES))

    ops.call_with_info(ir.create_graph(body, v), v).set_parent_input_modified(v)
    store(v)


def through_nested_calls(ir: popxl.Ir, v: Any) -> None:
    def outer(x: popxl.TensorByRef) -> popxl.Tensor:
        return ops.call(popxl.gcg().ir.create_graph(bump_and_return, x), x)[0]

    ops.call(ir.create_graph(outer, v), v)
    store(v)


def through_what_a_call_returns(ir: popxl.Ir, v: Any) -> None:
    with popxl.in_sequence():
        (x,) = ops.call(ir.create_graph(bump_and_return, v), v)
        store(v)
    bump(x)


def through_a_loop_that_returns_it(ir: popxl.Ir, v: Any) -> None:
    site = ops.repeat_with_info(ir.create_graph(bump_and_return, v), 3, v)
    store(v)
    assert site.outputs


def of_a_call_and_of_an_op(ir: popxl.Ir, v: Any) -> None:
    ops.call(ir.create_graph(bump, v), v)
    bump(v)


def inside_a_called_graph(ir: popxl.Ir, v: Any) -> None:
    def body(x: popxl.TensorByRef) -> popxl.Tensor:
        y = x * 2
        bump(x)
        return y

    ops.call(ir.create_graph(body, v), v)


def inside_a_loop(ir: popxl.Ir, v: Any) -> None:
    def body(x: popxl.TensorByRef) -> None:
        bump(x)
        bump(x)

    ops.repeat(ir.create_graph(body, v), 3, v)


def between_blocks(ir: popxl.Ir, v: Any) -> None:
    with popxl.in_sequence():
        store(v)
    with popxl.in_sequence():
        bump(v)


def in_an_unordered_step(ir: popxl.Ir, v: Any) -> None:
    with popxl.in_sequence(), popxl.in_sequence(False):
        store(v)
        bump(v)


def partly_in_a_block(ir: popxl.Ir, v: Any) -> None:
    store(v)
    with popxl.in_sequence():
        bump(v)
        store(v)


def sequence_that_is_passed(ir: popxl.Ir, v: Any) -> None:
    with popxl.in_sequence(), popxl.in_sequence("pass"):
        store(v)
        bump(v)


def of_a_loaded_row(ir: popxl.Ir, v: Any) -> None:
    buffer = popxl.remote_buffer((4, 4), popxl.float32, 1)
    x = ops.remote_load(buffer, 0)
    x += 1
    ops.remote_store(buffer, 0, x)


def inside_a_fragment(ir: popxl.Ir, v: Any) -> None:
    with _execution_context(ExecutionContext.WeightsFromHostFragment):
        x = v * 2
        bump(x)
        bump(x)
    store(x)


AMBIGUOUS = [
    read_then_write,
    write_then_read,
    two_writes,
    far_apart,
    through_a_view,
    through_a_join,
    through_overlapping_slices,
    through_a_slice,
    through_the_whole,
    through_calls,
    through_a_call_that_returns_a_view,
    through_a_call_that_is_declared_to_write,
    through_nested_calls,
    through_what_a_call_returns,
    through_a_loop_that_returns_it,
    of_a_call_and_of_an_op,
    inside_a_called_graph,
    inside_a_loop,
    of_a_loaded_row,
    inside_a_fragment,
]
ALSO_IN_SEQUENCE = [
    between_blocks,
    in_an_unordered_step,
    partly_in_a_block,
    sequence_that_is_passed,
]
"""Programs with blocks of their own that do not order what they do."""


@pytest.mark.parametrize("build", AMBIGUOUS + ALSO_IN_SEQUENCE)
def test_writes_whose_order_nothing_fixes_are_refused(build: Build) -> None:
    with pytest.raises(popart.popart_exception, match="^Inplacing ambiguity detected."):
        popxl.Session(made(build))


@pytest.mark.parametrize("build", AMBIGUOUS + [between_blocks, partly_in_a_block])
def test_the_same_programs_in_sequence_are_accepted(build: Build) -> None:
    popxl.Session(made(build, sequence=True))


@pytest.mark.parametrize("build", AMBIGUOUS)
def test_the_session_option_switches_the_check_off(build: Build) -> None:
    ir = made(build)
    assert ir._pb_ir.getSessionOptions().enableInplaceAmbiguityChecking is True
    ir._pb_ir.getSessionOptions().enableInplaceAmbiguityChecking = False
    popxl.Session(ir)


def test_the_message_names_tensor_ops_lines_and_mend() -> None:
    def build(ir: popxl.Ir, v: Any) -> None:
        y = v.reshape_((16,)) + 1
        ops.add_(v, popxl.constant(ONES))
        store(y)

    line = build.__code__.co_firstlineno
    expected = (
        r"^Inplacing ambiguity detected\. Session: got %v: float32\[4, 4\] of graph 'main', which op 'add', built at "
        rf".*test_ambiguity.py:{line + 1}, reads through %v_reshaped\S* and op 'add_', built at .*test_ambiguity.py:"
        rf"{line + 2}, writes to; expected an order of the two, .* Put both into `with popxl.in_sequence\(\):`, .* "
        r"out-of-place form"
    )
    with pytest.raises(popart.popart_exception) as error:
        popxl.Session(made(build))
    assert re.search(expected, str(error.value)), str(error.value)


def test_a_refused_program_can_be_mended_and_run() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(ONES)
        read_then_write(ir, v)
    with pytest.raises(popart.popart_exception, match="^Inplacing"):
        popxl.Session(ir)
    ir._pb_ir.getSessionOptions().enableInplaceAmbiguityChecking = False
    with popxl.Session(ir) as session:
        (result,) = session.run().values()
    np.testing.assert_array_equal(result, ONES)


# Accepted


def data_orders_it(ir: popxl.Ir, v: Any) -> None:
    """A training step that nobody put in sequence: every gradient goes into the norm before a
    weight is written.
    """
    weights = [popxl.variable(ONES) for _ in range(20)]
    layers = [v]
    for w in weights:
        layers.append(layers[-1] @ w)
    dy, gradients = layers[-1] * 2, []
    for w, x in zip(weights[::-1], layers[-2::-1]):
        gradients.append((w, x.T @ dy))
        dy = dy @ w.T
    norm = ops.sum(dy)
    for _, dw in gradients:
        norm = norm + ops.sum(dw * dw)
    for w, dw in gradients:
        ops.scaled_add_(w, dw / norm, b=-0.1)


def data_orders_it_but_for_the_last(ir: popxl.Ir, v: Any) -> None:
    w = popxl.variable(ONES)
    y = v @ w
    ops.add_(w, v.T @ y)


def a_single_write(ir: popxl.Ir, v: Any) -> None:
    bump(v)


def the_result_of_a_write(ir: popxl.Ir, v: Any) -> None:
    store(ops.add_(v, popxl.constant(ONES)) * 2)


def a_chain_of_writes(ir: popxl.Ir, v: Any) -> None:
    x = v
    for _ in range(5):
        x = ops.add_(x, popxl.constant(ONES))
    store(x.reshape_((16,)))


def an_op_that_reads_what_it_writes(ir: popxl.Ir, v: Any) -> None:
    ops.add_(v, v)


def slices_apart(ir: popxl.Ir, v: Any) -> None:
    for i in range(4):
        row = ops.slice_(v, i, i + 1)
        ops.add_(ops.slice_(row, 0, 2, axis=1), popxl.constant(np.ones((1, 2), np.float32)))
        store(ops.slice_(row, 2, 4, axis=1))


def copies(ir: popxl.Ir, v: Any) -> None:
    x = v.reshape((16,))
    ops.add_(x, popxl.constant(np.ones(16, np.float32)))
    store(v)


def calls_by_value(ir: popxl.Ir, v: Any) -> None:
    def body(x: popxl.Tensor) -> popxl.Tensor:
        return ops.add_(x, popxl.constant(ONES))

    graph = ir.create_graph(body, v)
    store(ops.call(graph, v)[0])
    store(ops.call(graph, v)[0])


def calls_that_return_nothing_of_what_they_change(ir: popxl.Ir, v: Any) -> None:
    def doubled(x: popxl.TensorByRef) -> popxl.Tensor:
        with popxl.in_sequence():
            y = x * 2
            bump(x)
        return y

    def outer(x: popxl.TensorByRef, held: Held) -> None:
        for graph in held.graphs:
            ops.call(graph, x)

    graphs = [ir.create_graph(bump, v), ir.create_graph(doubled, v)]
    for graph in graphs:
        store(v)
        ops.call(graph, v)
        ops.repeat(graph, 1, v) if not graph.outputs else ops.call(graph, v)
        store(v)
    ops.call(ir.create_graph(outer, v, Held(*graphs)), v)
    store(v)


def references_that_nobody_changes(ir: popxl.Ir, v: Any) -> None:
    def body(x: popxl.TensorByRef) -> popxl.Tensor:
        return x * 2

    graph = ir.create_graph(body, v)
    store(ops.call(graph, v)[0])
    store(v)


def readers(ir: popxl.Ir, v: Any) -> None:
    for _ in range(3):
        store(v)


def steps_of_a_block(ir: popxl.Ir, v: Any) -> None:
    with popxl.in_sequence():
        store(v)
        with popxl.in_sequence(False):
            bump(v)
            store(popxl.constant(1.0))
        store(v)
        with popxl.in_sequence(False), popxl.in_sequence():
            bump(v)
            bump(v)
        store(v)


def blocks_of_other_graphs(ir: popxl.Ir, v: Any) -> None:
    """A block goes on after graphs that are built inside it, and orders their ops, too."""

    def body(x: popxl.TensorByRef) -> None:
        bump(x)
        bump(x)

    with popxl.in_sequence():
        store(v)
        graph = ir.create_graph(body, v)
        ops.call(graph, v)
        bump(v)


def fragments(ir: popxl.Ir, v: Any) -> None:
    """What runs while weights travel runs before, or after, the program."""
    with _execution_context(ExecutionContext.WeightsFromHostFragment):
        x = v * 2
        bump(x)
    bump(x)
    with _execution_context(ExecutionContext.WeightsToHostFragment):
        buffer = popxl.remote_buffer((4, 4), popxl.float32, 1)
        ops.remote_store(buffer, 0, x)


def graphs_that_nobody_calls(ir: popxl.Ir, v: Any) -> None:
    def body(x: popxl.TensorByRef) -> None:
        bump(x)
        bump(x)

    ir.create_graph(body, v)
    store(v)


ORDERED = [
    data_orders_it,
    data_orders_it_but_for_the_last,
    a_single_write,
    the_result_of_a_write,
    a_chain_of_writes,
    an_op_that_reads_what_it_writes,
    slices_apart,
    copies,
    calls_by_value,
    calls_that_return_nothing_of_what_they_change,
    references_that_nobody_changes,
    readers,
    steps_of_a_block,
    blocks_of_other_graphs,
    fragments,
    graphs_that_nobody_calls,
]


@pytest.mark.parametrize("build", ORDERED)
def test_programs_whose_writes_are_ordered_are_accepted(build: Build) -> None:
    popxl.Session(made(build))


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_calls_that_nothing_orders_run_in_the_order_in_which_they_were_made(
    interpret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps at random on three numbers, in calls and loops, against the same steps in Python."""
    monkeypatch.setenv("POPXL_INTERPRET", interpret)

    def add_twice(x: popxl.TensorByRef, y: popxl.Tensor) -> None:
        with popxl.in_sequence():
            ops.add_(x, y)
            ops.add_(x, y)

    def triple(x: popxl.TensorByRef) -> popxl.Tensor:
        with popxl.in_sequence():
            y = x + 1
            ops.var_updates.copy_var_update_(x, x * 3)
        return y

    draw, ir, expected = np.random.default_rng(0), popxl.Ir(), []
    numbers = [1.0, 2.0, 3.0]
    with ir.main_graph:
        variables = [popxl.variable(n, popxl.float32) for n in numbers]
        streams = []
        graphs = ir.create_graph(add_twice, *variables[:2]), ir.create_graph(triple, variables[0])
        for _ in range(60):
            one, other = draw.choice(3, 2, replace=False)
            kind = draw.integers(4)
            if kind == 0:
                ops.call(graphs[0], variables[one], variables[other])
                numbers[one] += 2 * numbers[other]
            elif kind == 1:
                ops.repeat(graphs[0], 2, variables[one], variables[other])
                numbers[one] += 4 * numbers[other]
            elif kind == 2:
                (y,) = ops.call(graphs[1], variables[one])
                streams.append(popxl.d2h_stream((), popxl.float32))
                ops.host_store(streams[-1], y)
                expected.append(numbers[one] + 1)
                numbers[one] *= 3
            else:
                streams.append(popxl.d2h_stream((), popxl.float32))
                ops.host_store(streams[-1], variables[one])
                expected.append(numbers[one])
    with popxl.Session(ir) as session:
        results = session.run()
        found = [session.get_tensor_data(v) for v in variables]
    np.testing.assert_allclose([results[stream] for stream in streams], expected, rtol=1e-5)
    np.testing.assert_allclose(found, numbers, rtol=1e-5)


# What the add-ons build


def test_two_steps_of_an_optimizer_on_one_variable_are_those_of_pytorchs() -> None:
    rng = np.random.default_rng(0)
    start, *gradients = rng.normal(size=(3, 4, 4)).astype(np.float32)
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(start)
        facts, graph = AdamOptimizerStep().create_graph(
            v, v.spec, lr=0.1, first_order_dtype=popxl.float32
        )
        step = graph.bind(facts.init())
        for gradient in gradients:
            step.call(v, popxl.constant(gradient))
    with popxl.Session(ir) as session:
        session.run()
        found = session.get_tensor_data(v)
    weight = torch.tensor(start, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=0.1, eps=1e-5, weight_decay=1e-2)
    for gradient in gradients:
        weight.grad = torch.tensor(gradient)
        optimizer.step()
    np.testing.assert_allclose(found, weight.detach().numpy(), rtol=1e-5)


def test_an_optimizer_orders_its_own_writes() -> None:
    def build(ir: popxl.Ir, v: Any) -> None:
        facts, graph = AdamOptimizerStep().create_graph(v, v.spec, lr=0.1)
        graph.bind(facts.init()).call(v, popxl.constant(ONES))

    popxl.Session(made(build))


def test_accumulators_and_their_counter_are_ordered_also_with_recomputation_and_in_a_loop() -> None:
    class Layer(addons.Module):
        def build(self, x: popxl.Tensor) -> popxl.Tensor:
            w = self.add_variable_input("w", lambda: ONES, x.dtype)
            b = self.add_variable_input("b", lambda: ONES, x.dtype)
            return ops.tanh(x @ w) + b

    def build(ir: popxl.Ir, v: Any) -> None:
        _, forward = Layer().create_graph(v)
        accumulators, gradient = addons.autodiff_with_accumulation(forward, forward.args.tensors)
        again = addons.recompute_graph(gradient)
        inputs = {**again.args.to_mapping(accumulators.init())}
        free = [t for t in again.graph.inputs if t not in inputs]
        ops.repeat(again.graph, 3, inputs_dict={**inputs, **dict.fromkeys(free, v)})

    popxl.Session(made(build))


def test_a_copy_of_a_graph_is_ordered_as_the_graph_is() -> None:
    def build(ir: popxl.Ir, v: Any) -> None:
        graph, copy = (
            ir.create_graph(popxl.in_sequence()(two_bumps), v),
            ir.create_empty_graph("copy"),
        )
        with copy:
            clone_ops(
                graph, {graph.inputs[0]: popxl.graph_input((4, 4), popxl.float32, "x", by_ref=True)}
            )
        ops.call(copy, v)

    popxl.Session(made(build))


def two_bumps(x: popxl.TensorByRef) -> None:
    bump(x)
    bump(x)


def test_ops_that_are_moved_keep_their_order() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(ONES)
        with popxl.in_sequence():
            bump(v)
            store(v)
            bump(v)
        addons.repeat_graph(ir.main_graph, 2)
    ir.num_host_transfers = 2
    with popxl.Session(ir) as session:
        (result,) = session.run().values()
    np.testing.assert_array_equal(result, np.stack([ONES * 2, ONES * 4]))


# The order of ops, against a closure


def descendants(before: list[list[int]]) -> list[set[int]]:
    """Nodes that are reached from each, by the definition."""
    reached: list[set[int]] = [set() for _ in before]
    for node in reversed(range(len(before))):
        for other in before[node]:
            reached[other] |= {node} | reached[node]
    return reached


@pytest.mark.parametrize("seed", range(30))
def test_the_order_of_random_programs_is_the_closure_of_data_and_sequence(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ir = popxl.Ir()
    made: list[popxl.Tensor] = []
    blocks: dict[int, list[int]] = {}
    with ir.main_graph:
        v = popxl.variable(np.float32(1))
        for block in range(12):
            ordered = rng.random() < 0.4
            with popxl.in_sequence(True if ordered else "pass"):
                for _ in range(rng.integers(1, 6)):
                    if ordered:
                        blocks.setdefault(block, []).append(len(made))
                    chosen = [v, *made]
                    made.append(
                        chosen[rng.integers(len(chosen))] + chosen[rng.integers(len(chosen))]
                    )
    number = {t: i for i, t in enumerate(made)}
    before = [[number[t] for t in op.inputs if t in number] for op in ir.main_graph.ops]
    for members in blocks.values():
        for one, other in zip(members, members[1:]):
            before[other].append(one)
    reached, order, graph = (
        descendants(before),
        OpOrder(ir.main_graph.ops, Steps()),
        ir.main_graph.ops,
    )
    for one, other in itertools.combinations(range(len(graph)), 2):
        assert order.is_before(graph[one], graph[other]) == (other in reached[one]), (one, other)


# The work


def training(layers: int) -> popxl.Ir:
    """Three projections, joined, per layer, and an update of each weight after the norm of all
    gradients.
    """

    def build(ir: popxl.Ir, v: Any) -> None:
        weights = [[popxl.variable(ONES) for _ in range(3)] for _ in range(layers)]
        x, kept = v, []
        for q, k, w in weights:
            kept.append((x, x @ q, x @ k, x @ w))
            x = x + ((kept[-1][1] @ kept[-1][2].T) @ kept[-1][3])
        dx, gradients = x * 2, []
        for (q, k, w), (x, a, b, c) in zip(weights[::-1], kept[::-1]):
            dc = (a @ b.T).T @ dx
            dab = dx @ c.T
            da, db = dab @ b, dab.T @ a
            dx = dx + dc @ w.T + da @ q.T + db @ k.T
            gradients += [(t, x.T @ dt) for t, dt in ((q, da), (k, db), (w, dc))]
        norm = ops.sum(dx)
        for _, dt in gradients:
            norm = norm + ops.sum(dt * dt)
        for t, dt in gradients:
            ops.scaled_add_(t, dt / norm, b=-0.1)

    return made(build)


def nested(depth: int) -> popxl.Ir:
    """Every graph calls the one below twice."""

    def build(ir: popxl.Ir, v: Any) -> None:
        graph = ir.create_graph(bump, v)
        for _ in range(depth):

            def outer(x: popxl.TensorByRef, held: Held) -> None:
                (graph,) = held.graphs
                ops.call(graph, x)
                ops.call(graph, x)

            with popxl.in_sequence():
                graph = ir.create_graph(outer, v, Held(graph))
        ops.call(graph, v)

    return made(build)


class Held:
    """Graphs among the arguments of a graph function."""

    def __init__(self, *graphs: popxl.Graph) -> None:
        self.graphs = graphs


def hub(readers: int) -> popxl.Ir:
    """One variable with many readers, all joined before it is written."""

    def build(ir: popxl.Ir, v: Any) -> None:
        total = v * 0
        for _ in range(readers):
            total = total + v
        ops.var_updates.copy_var_update_(v, total)

    return made(build)


def wide(readers: int) -> popxl.Ir:
    """Readers that do not wait for each other, joined by a tree, before a write."""

    def build(ir: popxl.Ir, v: Any) -> None:
        level = [v * float(i) for i in range(readers)]
        while len(level) > 1:
            level = [
                a + b for a, b in itertools.zip_longest(level[::2], level[1::2], fillvalue=level[0])
            ]
        ops.var_updates.copy_var_update_(v, level[0])

    return made(build)


def writers_apart(number: int) -> popxl.Ir:
    """Every row of a variable is written by itself."""

    def build(ir: popxl.Ir, v: Any) -> None:
        rows = popxl.variable(np.ones((number, 2), np.float32))
        for i in range(number):
            ops.add_(ops.slice_(rows, i, i + 1), popxl.constant(np.ones((1, 2), np.float32)))

    return made(build)


def steps_of(ir: popxl.Ir) -> int:
    steps = Steps()
    ambiguity.check_ambiguity(ir, steps)
    return steps.count


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("program", [training, hub, wide, nested])
def test_the_work_grows_with_the_program_and_nothing_is_left_undecided(program: Any) -> None:
    sizes = (8, 16, 32) if program is nested else (50, 100, 200)
    small, middle, large = (steps_of(program(n)) for n in sizes)
    assert large - middle <= 2.4 * (middle - small)
    ir = program(sizes[-1])
    size = sum(1 + len(op.inputs) + len(op.outputs) for graph in ir.graphs for op in graph.ops)
    assert large < ambiguity.STEPS_PER_OPERAND * size, "the limit was not met"


def test_the_work_is_bounded_where_it_would_not_be_linear() -> None:
    ir = writers_apart(600)
    size = sum(1 + len(op.inputs) + len(op.outputs) for op in ir.main_graph.ops)
    assert steps_of(ir) <= (ambiguity.STEPS_PER_OPERAND + 1) * size + 4096
