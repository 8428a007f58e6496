"""A pipeline gives what its stages give when they run one after the other, once per micro-batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import popxl
import popxl_addons as addons
import pytest
import torch
from helpers.addons_programs import normal, run_session
from popxl import ops
from popxl.context import _execution_context, get_current_context
from popxl.errors import GraphError
from popxl.extensions import verify
from popxl_addons.transforms.pipelining import Pipelining, Restore, Stash

N, C = 2, 5
W = [normal(C, C, seed=i) for i in range(3)]


class OneAfterTheOther:
    """A pipeline's interface for a body that is built once per micro-batch."""

    @contextmanager
    def stage(self, i: int) -> Iterator[None]:
        yield

    def stash_and_restore_tensor(
        self, t: popxl.Tensor, from_stage: int | None = None
    ) -> popxl.Tensor:
        ipu = get_current_context().ipu_id
        return t if ipu is None else t.copy_to_ipu(ipu, 0)

    def stash_and_restore_activations(
        self, call_info: Any, grad_info: Any
    ) -> dict[popxl.Tensor, popxl.Tensor]:
        return grad_info.inputs_dict(call_info)


def run_steps(body: Any, steps: int, pipelined: bool) -> None:
    """``body(pipeline)`` for every micro-batch: as a pipeline, or built ``steps`` times."""
    if pipelined:
        with addons.pipelined_execution(steps) as pipeline:
            body(pipeline)
    else:
        for _ in range(steps):
            body(OneAfterTheOther())


def forward_program(stages: int, steps: int, pipelined: bool) -> Any:
    """Each stage multiplies, drops and adds to a sum; the first result is used again in the last
    stage.

    Returns (program, input stream, output streams, variables).
    """
    ir = popxl.Ir()
    ir.num_host_transfers = steps
    with ir.main_graph, popxl.in_sequence():
        stream = popxl.h2d_stream((N, C), popxl.float32, "x")
        results = [popxl.d2h_stream((N, C), popxl.float32, f"y{i}") for i in range(stages)]
        weights = [popxl.variable(W[i % 3], name=f"w{i}") for i in range(stages)]
        total = popxl.variable(np.zeros((N, C), np.float32), name="total")
        seed = popxl.variable(np.array([3, 4], np.uint32), name="seed")
        total += 1

        def body(pipeline: Any) -> None:
            for i in range(stages):
                with pipeline.stage(i), popxl.ipu(i):
                    if i == 0:
                        x = first = ops.host_load(stream)
                        now, following = ops.split_random_seed(seed)
                        ops.var_updates.copy_var_update_(seed, following)
                    x = ops.tanh(x @ weights[i])
                    if i == stages - 1:
                        x = x + pipeline.stash_and_restore_tensor(first)
                        x = ops.dropout(x, pipeline.stash_and_restore_tensor(now), 0.3)
                    ops.add_(total, x)
                    ops.host_store(results[i], total * 2)
                    x = x.copy_to_ipu(i + 1, i)

        run_steps(body, steps, pipelined)
        ops.var_updates.accumulator_scale_(total, 3.0)
    verify(ir)
    return ir, stream, results, [*weights, total, seed]


def repeated(steps: int, build: Any) -> None:
    build()
    addons.repeat_graph(popxl.gcg(), steps)


def pipelined(steps: int, build: Any) -> None:
    with addons.pipelined_execution(steps) as pipeline, pipeline.stage(0):
        build()


@pytest.mark.parametrize("several_times", [repeated, pipelined])
def test_state_that_travels_with_the_weights_travels_once_per_run(several_times):
    """A remote row that the program holds on the device: it is loaded before all steps and stored
    after them.
    """
    contexts = popxl.ExecutionContext
    with popxl.Ir().main_graph as main:
        buffer = popxl.remote_buffer((2,), popxl.float32, 1)
        variable = popxl.remote_variable(np.ones(2, np.float32), buffer, 0)

        def build() -> None:
            with _execution_context(contexts.WeightsFromHostFragment):
                state = ops.remote_load(buffer, 0)
            with _execution_context(contexts.WeightsToHostFragment):
                ops.remote_store(buffer, 0, state)
            ops.add_(state, popxl.constant(np.ones(2, np.float32)))

        several_times(3, build)
    session = popxl.Session(main.ir)
    names = [op.definition.name for op in main.ops]
    assert names == ["remote_load", "copy_var_update_", "repeat", "remote_store"]
    for run in (1, 2):
        with session:
            session.run()
        np.testing.assert_array_equal(session.get_tensor_data(variable), [1 + 3 * run] * 2)


@pytest.mark.parametrize("stages, steps", [(1, 2), (2, 4), (2, 7), (3, 6), (3, 8)])
def test_a_pipeline_gives_the_bits_of_its_stages_run_one_after_the_other(stages, steps):
    xs = normal(steps, N, C)
    runs = []
    for pipelined in (True, False):
        ir, stream, results, variables = forward_program(stages, steps, pipelined)
        outputs, values = run_session(ir, {stream: xs}, variables)
        runs.append([*(outputs[s] for s in results), *(values[v] for v in variables)])
    for together, apart in zip(*runs):
        np.testing.assert_array_equal(together, apart)
    assert all(np.abs(step).max() > 0.1 for step in np.diff(runs[0][0], axis=0))


def training_program(steps: int, pipelined: bool) -> Any:
    """Two layers, forward in stages 0 and 1, backward in 2 and 3 with accumulators, then one step
    of SGD.

    Returns (program, streams of x and label, stream of losses, weights).
    """
    ir = popxl.Ir()
    ir.num_host_transfers = steps
    with ir.main_graph, popxl.in_sequence():
        x_stream = popxl.h2d_stream((N, C), popxl.float32, "x")
        label_stream = popxl.h2d_stream((N,), popxl.int32, "label")
        losses = popxl.d2h_stream((), popxl.float32, "loss")
        layer = popxl.TensorSpec((N, C), popxl.float32)
        facts, fwd = addons.layers.Linear(C).create_graph(layer)
        accum_facts, grad = addons.autodiff_with_accumulation(
            fwd, fwd.args.tensors, grads_required=fwd.graph.inputs[:1]
        )
        weights = [facts.init(), facts.init()]
        accumulators = [accum_facts.init(), accum_facts.init()]
        info = grad.grad_graph_info

        def body(pipeline: Any) -> None:
            with pipeline.stage(0), popxl.ipu(0):
                call0 = fwd.bind(weights[0]).call_with_info(ops.host_load(x_stream))
                x = ops.tanh(call0.outputs[0])
            with pipeline.stage(1), popxl.ipu(1):
                call1 = fwd.bind(weights[1]).call_with_info(x.copy_to_ipu(1))
                label = ops.host_load(label_stream)
                loss, dx = addons.cross_entropy_with_grad(call1.outputs[0], label)
                ops.host_store(losses, loss)
            with pipeline.stage(2), popxl.ipu(1):
                args = pipeline.stash_and_restore_activations(call1, info)
                (dx,) = grad.bind(accumulators[1]).call(dx, args=args)
                dx = dx.copy_to_ipu(0)
            with pipeline.stage(3), popxl.ipu(0):
                y = pipeline.stash_and_restore_tensor(x)
                args = pipeline.stash_and_restore_activations(call0, info)
                grad.bind(accumulators[0]).call(dx * (1 - y * y), args=args)

        run_steps(body, steps, pipelined)
        for variables, means in zip(weights, accumulators):
            for name, w in variables.to_dict().items():
                ops.scaled_add_(w, means.accum[name], b=-0.5)
                ops.var_updates.accumulator_zero_(means.accum[name])
            ops.var_updates.accumulator_zero_(means.mean_accum_counter)
    verify(ir)
    return (
        ir,
        x_stream,
        label_stream,
        losses,
        [w for variables in weights for w in (variables.weight, variables.bias)],
    )


def torch_training(weights: list[np.ndarray], xs: np.ndarray, labels: np.ndarray, lr: float) -> Any:
    """(losses [runs, steps], final weights): the same with torch's autograd."""
    w0, b0, w1, b1 = parameters = [torch.tensor(w, requires_grad=True) for w in weights]
    losses = []
    for x, label in zip(torch.tensor(xs), torch.tensor(labels, dtype=torch.int64)):
        logits = torch.tanh(x @ w0 + b0) @ w1 + b1
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), label.flatten(), reduction="none"
        )
        losses.append(loss.reshape(label.shape).mean(1).detach().numpy())
        for w, dw in zip(parameters, torch.autograd.grad(loss.mean(), parameters)):
            w.data -= lr * dw
    return np.stack(losses), [w.detach().numpy() for w in parameters]


def test_training_in_a_pipeline_with_accumulation_follows_torch():
    steps, runs = 8, 3
    xs = normal(runs, steps, N, C)
    labels = np.random.default_rng(0).integers(0, C, (runs, steps, N)).astype(np.int32)
    start = [normal(C, C, seed=1), normal(C), normal(C, C, seed=2), normal(C, seed=3)]
    results = []
    for pipelined in (True, False):
        ir, x_stream, label_stream, losses, variables = training_program(steps, pipelined)
        session = popxl.Session(ir)
        session.write_variables_data(dict(zip(variables, start)))
        with session:
            curve = [
                session.run({x_stream: x, label_stream: label})[losses]
                for x, label in zip(xs, labels)
            ]
        values = session.get_tensors_data(variables)
        results.append([np.stack(curve), *(values[v] for v in variables)])
    for together, apart in zip(*results):
        np.testing.assert_array_equal(together, apart)
    curve, end = torch_training(start, xs, labels, lr=0.5)
    for ours, expected in zip(results[0], [curve, *end]):
        np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=2e-6)
    assert all(np.abs(w - first).max() > 1e-2 for w, first in zip(end, start))


def test_a_pipeline_may_be_differentiated_into_later():
    """A graph that stages call gains outputs when it is differentiated, after the pipeline was
    built as before.
    """
    ir = popxl.Ir()
    ir.num_host_transfers = 2
    with ir.main_graph, popxl.in_sequence():
        stream = popxl.h2d_stream((N, C), popxl.float32)
        out = popxl.d2h_stream((N, C), popxl.float32)
        graph = ir.create_graph(
            lambda x: ops.tanh(x) * ops.exp(x), popxl.TensorSpec((N, C), popxl.float32)
        )
        with addons.pipelined_execution(2) as pipeline, pipeline.stage(0):
            ops.host_store(out, ops.call(graph, ops.host_load(stream))[0])
        popxl.transforms.autodiff(graph)
    assert len(graph.outputs) > 1
    verify(ir)
    xs = normal(2, N, C)
    np.testing.assert_allclose(
        run_session(ir, {stream: xs})[0][out], np.tanh(xs) * np.exp(xs), rtol=1e-5
    )


def test_stages_run_in_their_order_whatever_the_order_they_were_built_in():
    ir = popxl.Ir()
    ir.num_host_transfers = 4
    with ir.main_graph, popxl.in_sequence():
        out = popxl.d2h_stream((), popxl.float32)
        v = popxl.variable(1.0)
        with addons.pipelined_execution(4) as pipeline:
            with pipeline.stage(1):
                ops.var_updates.accumulate_(v, popxl.constant(1.0))
                ops.host_store(out, v + 0)
            with pipeline.stage(0):
                ops.var_updates.accumulator_scale_(v, 2.0)
    verify(ir)
    np.testing.assert_array_equal(run_session(ir, {})[0][out], [3, 7, 15, 31])


def test_a_pipeline_is_one_repeat_and_what_stands_around_it_runs_once():
    ir, *_ = forward_program(2, 4, pipelined=True)
    assert [op.definition.name for op in ir.main_graph.ops] == [
        "add_",
        "repeat",
        "accumulator_scale_",
    ]
    (body,) = ir.main_graph.called_graphs
    assert body.name.startswith("main_pipeline") and [
        op.ipu for op in body.ops if op.definition.name == "tanh"
    ] == [
        0,
        1,
    ]


def a_pipeline(misuse: Any) -> Any:
    """Build a pipeline of three stages in a graph, with a misuse inside; returns its results."""
    with popxl.Ir().main_graph as main:

        def build(x: popxl.Tensor) -> Any:
            results: list[popxl.Tensor] = []
            with addons.pipelined_execution(6) as pipeline:
                for i in range(3):
                    with pipeline.stage(i):
                        results.append(ops.exp(x))
                        if i == 1:
                            misuse(pipeline, x, results)
                if misuse is outside_a_stage:
                    ops.exp(x)
                if misuse is stash_outside_a_stage:
                    pipeline.stash_and_restore_tensor(results[0])
            return ops.exp(results[0]) if misuse is after_the_pipeline else None

        main.ir.create_graph(build, popxl.TensorSpec((2,), popxl.float32))


def outside_a_stage(*_: Any) -> None: ...


def stash_outside_a_stage(*_: Any) -> None: ...


def after_the_pipeline(*_: Any) -> None: ...


def too_few_steps(pipeline: Any, x: popxl.Tensor, results: Any) -> None:
    with pipeline.stage(3):
        ops.exp(x)


def later_stage(pipeline: Any, x: popxl.Tensor, results: Any) -> None:
    with pipeline.stage(0):
        ops.exp(results[1])


def stash_of_later_stage(pipeline: Any, x: popxl.Tensor, results: Any) -> None:
    with pipeline.stage(0):
        pipeline.stash_and_restore_tensor(results[1])


def stash_without_producer(pipeline: Any, x: popxl.Tensor, results: Any) -> None:
    assert pipeline.stash_and_restore_tensor(x, from_stage=0) is x
    pipeline.stash_and_restore_tensor(x)


def negative_stage(pipeline: Any, x: popxl.Tensor, results: Any) -> None:
    with pipeline.stage(-1):
        raise AssertionError("not entered")


def result_as_output(pipeline: Any, x: popxl.Tensor, results: Any) -> None:
    popxl.graph_output(results[0])


@pytest.mark.parametrize(
    "misuse, error, words",
    [
        (outside_a_stage, RuntimeError, "outside a stage; expected every op"),
        (stash_outside_a_stage, RuntimeError, "got a call outside a stage"),
        (after_the_pipeline, GraphError, "from graph 'a_pipeline.build_pipeline"),
        (too_few_steps, ValueError, "got 6 steps for 4 stages; expected at least 8"),
        (later_stage, ValueError, "in stage 0, which uses %exp__1 of stage 1"),
        (stash_of_later_stage, RuntimeError, "of stage 1 in stage 0; expected an earlier"),
        (
            stash_without_producer,
            RuntimeError,
            "which no stage made; expected a result .* Pass from_stage=",
        ),
        (negative_stage, ValueError, "got -1; expected 0 or more"),
        (result_as_output, GraphError, "which the outputs of graph 'a_pipeline.build_subgraph"),
    ],
)
def test_misuse_of_a_pipeline_is_refused_in_words(misuse, error, words):
    with pytest.raises(error, match=words):
        a_pipeline(misuse)


def test_an_error_inside_a_pipeline_leaves_the_ops_where_they_are():
    with popxl.Ir().main_graph as main, pytest.raises(KeyError):
        with addons.pipelined_execution(2) as pipeline, pipeline.stage(0):
            popxl.variable(1.0) + 1
            raise KeyError("the program's own")
    assert [op.definition.name for op in main.ops] == ["add"]
    with main:
        popxl.variable(1.0) + 1


def test_schedules_by_hand_are_refused_with_what_to_use():
    for name in (Pipelining, Stash, Restore):
        with pytest.raises(NotImplementedError, match="expected popxl_addons.pipelined_execution"):
            name(popxl.Ir().main_graph)
