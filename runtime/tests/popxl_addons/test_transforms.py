"""Gradient accumulation, recomputation, batch serialisation and repetition: the same numbers, by
another route.
"""

import numpy as np
import popxl
import popxl_addons as addons
import pytest
import torch
from helpers.addons_programs import normal, run_program, run_session, store_all
from helpers.quick import cases
from popxl import ops
from popxl.extensions import alternate_steps
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.ops.cross_entropy_sharded_loss import logsumexp_and_pick
from popxl_addons.transforms.autodiff import remap_grad_info
from popxl_addons.transforms.batch_serialisation import (
    RemoteHandle,
    batch_serial_buffer,
    batch_serialise,
    batch_serialise_fwd_and_grad,
    batch_serialise_overlapped,
)
from popxl_addons.transforms.recomputation import Recomputation, recompute_graph, recompute_rest

ROWS, STEPS, N, C = 2, 3, 4, 5
W = [normal(C, C, seed=i) * 0.5 for i in range(ROWS)]
B = [normal(C, seed=i) for i in range(ROWS)]
XS, DYS = normal(STEPS, N, C, seed=7), normal(STEPS, N, C, seed=8)


class Layer(addons.Module):
    """y = x + dropout(tanh(x @ weight + bias))."""

    def __init__(self, rate=0.0):
        super().__init__()
        self.rate = rate

    def build(self, x, seed=None):
        self.weight = self.add_variable_input("weight", lambda: W[0], x.dtype)
        self.bias = self.add_variable_input("bias", lambda: B[0], x.dtype)
        h = ops.tanh(x @ self.weight + self.bias)
        return x + (ops.dropout(h, seed, self.rate) if self.rate else h)


def torch_gradients(layers=1):
    """Gradients: per layer the mean over micro-batches of weight and bias gradients; the inputs'
    gradients; the outputs.
    """
    ws = [torch.tensor(W[i], requires_grad=True) for i in range(layers)]
    bs = [torch.tensor(B[i], requires_grad=True) for i in range(layers)]
    xs = torch.tensor(XS, requires_grad=True)
    y = xs
    for w, b in zip(ws, bs):
        y = y + torch.tanh(y @ w + b)
    (y * torch.tensor(DYS)).sum().backward()
    return (
        [w.grad.numpy() / STEPS for w in ws],
        [b.grad.numpy() / STEPS for b in bs],
        xs.grad.numpy(),
        y.detach().numpy(),
    )


def test_accumulators_hold_the_mean_of_the_gradients_of_all_calls():
    def build(ir):
        x_spec = popxl.TensorSpec((N, C), popxl.float32)
        facts, fwd = Layer().create_graph(x_spec)
        accum_facts, grad = addons.autodiff_with_accumulation(
            fwd,
            fwd.args.tensors,
            grads_required=[fwd.graph.inputs[0]],
            replica_groupings=facts.replica_groupings,
        )
        assert (
            grad.args.keys_flat()
            == accum_facts.keys_flat()
            == ["accum.bias", "accum.weight", "mean_accum_counter"]
        )
        assert [c.fwd_tensor for c in grad.grad_graph_info.expected_outputs] == [
            fwd.graph.inputs[0]
        ]
        variables, accumulators = facts.init(), accum_facts.init()
        outputs = []
        for x, dy in zip(XS, DYS):
            call = fwd.bind(variables).call_with_info(popxl.variable(x))
            inputs = grad.grad_graph_info.inputs_dict(call)
            outputs += grad.bind(accumulators).call(popxl.variable(dy), args=inputs)
        return [
            *outputs,
            accumulators.accum.weight,
            accumulators.accum.bias,
            accumulators.mean_accum_counter,
        ]

    *dxs, weight, bias, counter = run_program(build)
    (expected_weight,), (expected_bias,), expected_dx, _ = torch_gradients()
    np.testing.assert_allclose(np.stack(dxs), expected_dx, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weight, expected_weight, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(bias, expected_bias, rtol=1e-5, atol=1e-6)
    assert counter == STEPS


def test_accumulators_have_the_variables_replica_grouping():
    """Each replica its own weight: the mean of each is read, not the first one's."""
    ir = popxl.Ir(replication=2)
    xs = np.stack([XS[0], 5 * XS[0]])
    with ir.main_graph, popxl.in_sequence():
        own = ir.replica_grouping(1, 1)
        layer = addons.layers.Linear(2, bias=False, replica_grouping=own)
        facts, fwd = layer.create_graph(popxl.TensorSpec((N, C), popxl.float32))
        accum_facts, grad = addons.autodiff_with_accumulation(fwd, fwd.args.tensors)
        assert accum_facts.accum.weight.replica_grouping == own
        accumulators = accum_facts.init()
        stream = popxl.h2d_stream((N, C), popxl.float32)
        call = fwd.bind(facts.init()).call_with_info(ops.host_load(stream))
        dy = popxl.variable(np.ones((N, 2), np.float32))
        grad.bind(accumulators).call(dy, args=grad.grad_graph_info.inputs_dict(call))
    with popxl.Session(ir) as session:
        session.run({stream: xs})
        mean = session.get_tensor_data(accumulators.accum.weight)
    expected = np.repeat(xs.sum(1)[..., None], 2, axis=-1)
    np.testing.assert_allclose(mean, expected, rtol=1e-5)


def test_setting_the_counter_to_zero_starts_a_new_mean_and_accumulators_may_be_wider_than_weights():
    def build(ir):
        x = popxl.variable(XS[0].astype(np.float16))
        facts, fwd = Layer().create_graph(x)
        accum_facts, grad = addons.autodiff_with_accumulation(
            fwd, [fwd.args.weight], accumulator_dtype=popxl.float32
        )
        assert (
            accum_facts.accum.weight.dtype is popxl.float32
            and fwd.args.weight.dtype is popxl.float16
        )
        variables, accumulators = facts.init(), accum_facts.init()
        call = fwd.bind(variables).call_with_info(x)
        inputs = grad.grad_graph_info.inputs_dict(call)
        for dy in DYS:
            ops.var_updates.copy_var_update_(accumulators.mean_accum_counter, popxl.constant(0.0))
            grad.bind(accumulators).call(popxl.variable(dy.astype(np.float16)), args=inputs)
        return [accumulators.accum.weight, accumulators.mean_accum_counter]

    weight, counter = run_program(build)
    w = torch.tensor(W[0], requires_grad=True)
    (
        torch.tanh(torch.tensor(XS[0]) @ w + torch.tensor(B[0])) * torch.tensor(DYS[-1])
    ).sum().backward()
    np.testing.assert_allclose(weight, w.grad.numpy(), rtol=2e-2, atol=2e-2)
    assert counter == 1 and weight.dtype == np.float32


def gradient_and_accumulators(module, x, dy, name):
    """The gradient of the variable of that name, which comes out, and the accumulators of all."""
    facts, fwd = module.create_graph(x)
    accum_facts, grad = addons.autodiff_with_accumulation(
        fwd, fwd.args.tensors, grads_required=[fwd.args.to_dict()[name]]
    )
    accumulators = accum_facts.init()
    call = fwd.bind(facts.init()).call_with_info(x)
    (out,) = grad.bind(accumulators).call(dy, args=grad.grad_graph_info.inputs_dict(call))
    return out, accumulators.accum


def test_a_tensor_may_be_accumulated_and_come_out_and_unreached_ones_get_zeros():
    class Unused(addons.Module):
        def build(self, x):
            self.used = self.add_variable_input("used", lambda: np.ones(3), x.dtype)
            self.unused = self.add_variable_input("unused", lambda: np.ones(3), x.dtype)
            return x * self.used

    def build(ir):
        x = popxl.variable(normal(3))
        out, accum = gradient_and_accumulators(Unused(), x, x, "used")
        return [out, accum.used, accum.unused]

    out, used, unused = run_program(build)
    np.testing.assert_allclose(out, normal(3) ** 2, rtol=1e-6)
    np.testing.assert_array_equal(out, used)
    np.testing.assert_array_equal(unused, np.zeros(3))


class Raising(addons.Module):
    """y = x * w, whose gradient by hand is changed in place after it was made."""

    def build(self, x):
        w = self.add_variable_input("w", lambda: np.full(3, 2.0), x.dtype)
        self.aux["x"], self.aux["w"] = x, w
        return x * w

    def build_grad(self, dy):
        dw = dy * self.aux["x"]
        dw += 0.5 * self.aux["w"]
        self.var_grad["w"] = dw


def test_a_gradient_that_is_changed_in_place_is_accumulated_as_it_comes_out():
    def build(ir):
        x, dy = popxl.variable(np.arange(1.0, 4)), popxl.variable(np.ones(3))
        out, accum = gradient_and_accumulators(Raising(), x, dy, "w")
        return [out, accum.w]

    for found in run_program(build):
        np.testing.assert_array_equal(found, [2, 3, 4])


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [False, True])
def test_recomputation_needs_forward_inputs_only_and_changes_no_bit(accumulate):
    def build(ir):
        x, dy = popxl.variable(XS[0]), popxl.variable(DYS[0])
        seed = popxl.variable(np.array([3, 5], np.uint32))
        facts, fwd = Layer(0.3).create_graph(x, seed)
        variables = facts.init()
        wanted = [fwd.graph.inputs[0], *fwd.args.tensors]
        if accumulate:
            accum_facts, grad = addons.autodiff_with_accumulation(
                fwd, fwd.args.tensors, grads_required=wanted[:1]
            )
        else:
            accum_facts, grad = (
                addons.variable_factory.NamedVariableFactories(),
                addons.autodiff(fwd, None, wanted),
            )
        again = recompute_graph(grad)
        info = again.grad_graph_info
        assert (
            set(info.inputs[1:]) == set(fwd.graph.inputs)
            and again.args.keys_flat() == grad.args.keys_flat()
        )
        assert info.expected_outputs == grad.grad_graph_info.expected_outputs
        results = []
        for graph in (grad, again):
            accumulators = accum_facts.init()
            call = fwd.bind(variables).call_with_info(x, seed)
            inputs = graph.grad_graph_info.inputs_dict(call)
            results += graph.bind(accumulators).call(dy, args=inputs)
            results += accumulators.values_flat()
        return results

    results = run_program(build)
    half = len(results) // 2
    assert half == (4 if accumulate else 3)
    for plain, recomputed in zip(results[:half], results[half:]):
        np.testing.assert_array_equal(plain, recomputed)
        assert np.abs(plain).max() > 0


def test_what_is_kept_is_not_made_again_and_changes_no_bit():
    def build(ir):
        x, dy = popxl.variable(XS[0]), popxl.variable(DYS[0])
        seed = popxl.variable(np.array([3, 5], np.uint32))
        facts, fwd = Layer(0.3).create_graph(x, seed)
        variables = facts.init()
        grad = addons.autodiff(fwd, None, [fwd.graph.inputs[0], *fwd.args.tensors])
        found = Recomputation(grad)
        prices = found.prices(found.values)
        assert [t.name for t in prices] == ["add", "matmul", "tanh"]
        *free, dear = prices.values()
        assert max(free) < 1e-9 and dear > 2 * C / 4  # of the product, for each float32
        again = recompute_rest(grad, [list(prices)[-1]])
        rest, _ = again.graph.called_graphs
        assert rest.ops == () and fwd.graph.inputs[0] in again.grad_graph_info.inputs
        results = []
        for graph in (grad, again):
            call = fwd.bind(variables).call_with_info(x, seed)
            results += graph.call(dy, args=graph.grad_graph_info.inputs_dict(call))
        return results

    results = run_program(build)
    half = len(results) // 2
    for plain, recomputed in zip(results[:half], results[half:]):
        np.testing.assert_array_equal(plain, recomputed)


@pytest.mark.parametrize("kept", [0, 1])
def test_one_of_an_ops_results_may_be_kept(kept):
    def build(ir):
        x, i = popxl.variable(XS[0]), popxl.variable(np.array([0, 1, 2, 3], np.int32))

        def norms(x, i):
            n, p = logsumexp_and_pick(x, i)
            return n * n + p * p

        fwd = addons.GraphWithNamedArgs(ir.create_graph(norms, x, i))
        grad = addons.autodiff(fwd, grads_required=fwd.graph.inputs[:1])
        results = fwd.graph.ops[0].outputs
        dy, found = popxl.variable(np.ones(N)), []
        again = recompute_rest(grad, [results[kept]])
        for graph in (grad, again):
            call = fwd.call_with_info(x, i)
            found += graph.call(dy, args=graph.grad_graph_info.inputs_dict(call))
        return found

    plain, recomputed = run_program(build)
    np.testing.assert_array_equal(plain, recomputed)
    assert np.abs(plain).max() > 0


def test_recomputation_keeps_the_order_provided_needed_others_by_reference():
    ir = popxl.Ir()
    with ir.main_graph:
        spec, seed = popxl.TensorSpec((N, C), popxl.float32), popxl.TensorSpec((2,), popxl.uint32)
        _, fwd = Layer(0.3).create_graph(spec, seed)
        _, grad = addons.autodiff_with_accumulation(
            fwd, [fwd.args.weight], grads_required=[fwd.graph.inputs[0]]
        )
        again = recompute_graph(grad)
    names = [t.name for t in again.graph.inputs]
    assert names[0].startswith("Gradient___") and names[-2:] == [
        "accum.weight",
        "mean_accum_counter",
    ]
    assert sorted(names[1:-2]) == ["bias", "seed", "weight", "x"]
    assert again.graph._by_ref_inputs == {again.args.accum.weight, again.args.mean_accum_counter}


@pytest.mark.parametrize("together", [1, 2, STEPS])
def test_batch_serialisation_loads_calls_and_stores_once_per_step(together):
    """y = x * w + s with x streamed, s from a buffer row, results stored to a stream and two buffer
    rows.
    """
    ir = popxl.Ir()
    ir.num_host_transfers = STEPS
    alternate_steps(ir, together)

    def step(x, s, w):
        return x * w + s, s * 2

    with ir.main_graph, popxl.in_sequence():
        spec = popxl.TensorSpec((C,), popxl.float32)
        graph = addons.GraphWithNamedArgs(ir.create_graph(step, spec, spec, spec))
        x, s, w = graph.graph.inputs
        y, doubled = graph.graph.outputs
        graph.args.insert("w", w)
        x_stream, y_stream = (
            popxl.h2d_stream((C,), popxl.float32, "x"),
            popxl.d2h_stream((C,), popxl.float32, "y"),
        )
        s_buffer, y_buffer = (
            batch_serial_buffer(s, STEPS, 2),
            popxl.remote_buffer((C,), popxl.float32, 1),
        )
        row0_buffer = popxl.remote_buffer((C,), popxl.float32, 1)
        for entry in range(2 * STEPS):
            ops.remote_store(s_buffer, entry, popxl.constant(np.full(C, entry, np.float32)))
        result = batch_serialise(
            graph,
            STEPS,
            load_handles={
                x: x_stream,
                s: RemoteHandle(s_buffer, lambda row: popxl.constant(2, popxl.int32) - row),
            },
            store_streams={y: y_stream},
            store_buffers={
                y: (y_buffer, 1),
                doubled: RemoteHandle(row0_buffer, None),
                s: RemoteHandle(s_buffer, 0),
            },
            rows=2,
            io_mode="compute",
        )
        assert (
            y_buffer.entries == STEPS * 3
            and row0_buffer.entries == STEPS
            and s_buffer.entries == STEPS * 2
        )
        assert [t.name for t in result.graph.graph.inputs] == [
            "row",
            "w",
        ] and not result.graph.graph.outputs
        assert result.graph.args.w is result.remap_tensors(NamedTensors(w=w)).w
        assert set(result.stored_buffers) == {y, doubled}
        result.graph.bind(NamedTensors(w=popxl.variable(np.full(C, 3.0, np.float32)))).call(1)
        stored = [ops.remote_load(y_buffer, 2 * STEPS + i) for i in range(STEPS)]
        stored += [ops.remote_load(row0_buffer, i) for i in range(STEPS)]
        streams = [popxl.d2h_stream(t.shape, t.dtype) for t in stored]
        for stream, t in zip(streams, stored):
            ops.host_store(stream, t)
    xs = normal(STEPS, C)
    results, _ = run_session(ir, {x_stream: xs})
    expected = xs * 3 + (STEPS + np.arange(STEPS))[:, None]
    np.testing.assert_allclose(results[y_stream], expected, rtol=1e-6)
    for i in range(STEPS):
        np.testing.assert_allclose(results[streams[i]][0], expected[i], rtol=1e-6)
        np.testing.assert_allclose(results[streams[STEPS + i]][0], np.full(C, 2.0 * (STEPS + i)))


@pytest.mark.parametrize("is_loaded", [False, True])
def test_what_a_step_makes_of_an_input_in_place_is_stored(is_loaded):
    ir = popxl.Ir()
    ir.num_host_transfers = STEPS

    def step(x):
        x += 1
        return x

    with ir.main_graph, popxl.in_sequence():
        graph = addons.GraphWithNamedArgs(
            ir.create_graph(step, popxl.TensorSpec((C,), popxl.float32))
        )
        (x,) = graph.graph.inputs
        stream, out = (make((C,), popxl.float32) for make in (popxl.h2d_stream, popxl.d2h_stream))
        rows, kept = batch_serial_buffer(x, STEPS), batch_serial_buffer(x, STEPS)
        for i in range(STEPS):
            ops.remote_store(rows, i, popxl.constant(XS[i, 0]))
        load = RemoteHandle(rows) if is_loaded else stream
        result = batch_serialise(
            graph, STEPS, {x: load}, {x: out}, {x: RemoteHandle(kept)}, io_mode="compute"
        )
        result.graph.call(0)
        stored = store_all([ops.remote_load(kept, i) for i in range(STEPS)])
    results, _ = run_session(ir, {} if is_loaded else {stream: XS[:, 0]})
    np.testing.assert_array_equal(results[out], XS[:, 0] + 1)
    np.testing.assert_array_equal([results[s][0] for s in stored], XS[:, 0] + 1)


def test_the_gradient_of_a_step_is_given_what_that_made_of_an_input_in_place():
    class Moving(Raising):
        def build(self, x):
            x += 1
            return super().build(x)

        def build_grad(self, dy):
            self.var_grad["w"] = dy * self.aux["x"]

    ir = popxl.Ir()
    ir.num_host_transfers = 2
    with ir.main_graph, popxl.in_sequence():
        facts, fwd = Moving().create_graph(popxl.TensorSpec((3,), popxl.float32))
        grad = addons.autodiff(fwd, grads_required=[fwd.args.w])
        rows = batch_serial_buffer(fwd.graph.inputs[0], 2)
        for i in range(2):
            ops.remote_store(rows, i, popxl.constant(np.full(3, i, np.float32)))
        dy, out = popxl.h2d_stream((3,), popxl.float32), popxl.d2h_stream((3,), popxl.float32)
        loads = {fwd.graph.inputs[0]: RemoteHandle(rows), grad.graph.inputs[0]: dy}
        stores, variables = {grad.graph.outputs[0]: out}, facts.init()
        both = batch_serialise_fwd_and_grad(
            fwd, grad, fwd.args, 2, loads, stores, {}, io_mode="compute"
        )
        for serialised in both:
            serialised.graph.bind(variables).call(0)
    results, _ = run_session(ir, {dy: np.ones((2, 3), np.float32)})
    np.testing.assert_array_equal(results[out], [[1] * 3, [2] * 3])


def test_a_shard_is_loaded_as_it_is_and_stored_as_it_is():
    ir = popxl.Ir(replication=2)
    ir.num_host_transfers = 2
    with ir.main_graph, popxl.in_sequence():
        group = ir.replica_grouping()
        spec = popxl.TensorSpec((4,), popxl.float32, (8,))
        graph = addons.GraphWithNamedArgs(ir.create_graph(lambda x: x * 2, spec))
        x, y = graph.graph.inputs[0], graph.graph.outputs[0]
        buffers = [batch_serial_buffer(x, 2, 1, group) for _ in range(2)]
        whole = popxl.variable(np.arange(8, dtype=np.float32))
        for i in range(2):
            shard = ops.collectives.replica_sharded_slice(whole + float(i), group)
            ops.remote_store(buffers[0], i, shard)
        loaded, stored = ({t: RemoteHandle(b, 0, group)} for t, b in zip((x, y), buffers))
        batch_serialise(graph, 2, loaded, {}, stored, io_mode="compute").graph.call(0)
        gathered = [
            ops.collectives.replicated_all_gather(ops.remote_load(buffers[1], i), group=group)
            for i in range(2)
        ]
        streams = store_all(gathered)
    results, _ = run_session(ir, {})
    for i in range(2):
        expected = 2.0 * (np.arange(8) + i)
        np.testing.assert_array_equal(results[streams[i]][0], [expected, expected])


@pytest.mark.parametrize("together", [1, STEPS])
def test_each_step_sees_its_own_seed_split_from_the_callers(together):
    ir = popxl.Ir()
    ir.num_host_transfers = STEPS
    alternate_steps(ir, together)

    def draw(seed, mean):
        return ops.random_uniform(seed, (C,)) + mean

    with ir.main_graph:
        seed = popxl.variable(np.array([1, 2], np.uint32))
        graph = ir.create_graph(draw, seed, popxl.TensorSpec((), popxl.float32))
        stream = popxl.d2h_stream((C,), popxl.float32)
        result = addons.batch_serialise(
            addons.GraphWithNamedArgs(graph),
            STEPS,
            {},
            {graph.outputs[0]: stream},
            {},
            graph.inputs[0],
            io_mode="compute",
        )
        assert [t.name for t in result.graph.graph.inputs] == ["row", "seed", "mean"]
        result.graph.call(0, seed, popxl.constant(1.0))
        expected = []
        for _ in range(STEPS):
            step_seed, seed = ops.split_random_seed(seed)
            expected += ops.call(graph, step_seed, popxl.constant(1.0))
        streams = store_all(expected)
    results, _ = run_session(ir, {})
    for i in range(STEPS):
        np.testing.assert_array_equal(results[stream][i], results[streams[i]][0])
    assert len(np.unique(results[stream])) == STEPS * C


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "io_mode", cases(["compute", "io", "io_overlapped"], lambda mode: mode == "io_overlapped")
)
def test_phased_layers_give_the_gradients_of_the_whole_model(recompute, io_mode):
    """Two layers that share one graph, run layer by layer over all micro-batches, against torch's
    autograd.
    """
    ir = popxl.Ir()
    ir.num_host_transfers = 1
    ir._pb_ir.getSessionOptions().numIOTiles = 1
    with ir.main_graph, popxl.in_sequence():
        facts, fwd = Layer().create_graph(popxl.TensorSpec((N, C), popxl.float32))
        x, y = fwd.graph.inputs[0], fwd.graph.outputs[0]
        accum_facts, grad = addons.autodiff_with_accumulation(
            fwd, fwd.args.tensors, grads_required=[x]
        )
        if recompute:
            grad = recompute_graph(grad)
        x_buffer = batch_serial_buffer(x, STEPS, ROWS + 1)
        dx_buffer = batch_serial_buffer(x, STEPS, ROWS + 1)
        forward, gradient = batch_serialise_fwd_and_grad(
            fwd,
            grad,
            fwd.args,
            STEPS,
            load_handles={
                x: RemoteHandle(x_buffer, 0),
                grad.graph.inputs[0]: RemoteHandle(dx_buffer, 1),
            },
            store_streams={},
            store_buffers={
                y: RemoteHandle(x_buffer, 1),
                grad.graph.outputs[0]: RemoteHandle(dx_buffer, 0),
            },
            rows=ROWS,
            io_mode=io_mode,
        )
        weights = ["weight"] if not recompute else ["weight", "bias"]
        names = gradient.graph.args.keys_flat()
        assert sorted(names[: len(weights)]) == sorted(weights)
        assert names[len(weights) :] == ["accum.bias", "accum.weight", "mean_accum_counter"]
        if recompute:
            assert set(forward.stored_buffers) == {y}
        variables = [
            NamedTensors(weight=popxl.variable(W[i]), bias=popxl.variable(B[i]))
            for i in range(ROWS)
        ]
        accumulators = [accum_facts.init() for _ in range(ROWS)]
        for i in range(STEPS):
            ops.remote_store(x_buffer, i, popxl.constant(XS[i]))
            ops.remote_store(dx_buffer, ROWS * STEPS + i, popxl.constant(DYS[i]))
        for row in range(ROWS):
            forward.graph.bind(variables[row]).call(row)
        for row in reversed(range(ROWS)):
            named = variables[row].copy()
            named.update(accumulators[row])
            gradient.graph.bind(named).call(row)
        ys = store_all([ops.remote_load(x_buffer, ROWS * STEPS + i) for i in range(STEPS)])
        dxs = store_all([ops.remote_load(dx_buffer, i) for i in range(STEPS)])
    read = [t for a in accumulators for t in (a.accum.weight, a.accum.bias)]
    results, values = run_session(ir, {}, read)
    expected_weights, expected_biases, expected_dx, expected_y = torch_gradients(ROWS)
    np.testing.assert_allclose([results[s] for s in ys], expected_y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose([results[s] for s in dxs], expected_dx, rtol=1e-5, atol=1e-6)
    for row in range(ROWS):
        np.testing.assert_allclose(
            values[accumulators[row].accum.weight], expected_weights[row], rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(
            values[accumulators[row].accum.bias], expected_biases[row], rtol=1e-5, atol=1e-6
        )


def test_activations_of_streams_and_seeds_are_stored_for_the_gradient():
    """The case of dropout: the serialised gradient equals the plain one, bit for bit, so it saw the
    same seeds and inputs.
    """
    ir = popxl.Ir()
    ir.num_host_transfers = STEPS
    with ir.main_graph, popxl.in_sequence():
        seed = popxl.variable(np.array([9, 4], np.uint32))
        facts, fwd = Layer(0.4).create_graph(popxl.TensorSpec((N, C), popxl.float32), seed)
        x, seed_input = fwd.graph.inputs[:2]
        grad = addons.autodiff(fwd, grads_required=[fwd.args.weight])
        stream = popxl.h2d_stream((N, C), popxl.float32, "x")
        dy_stream = popxl.h2d_stream((N, C), popxl.float32, "dy")
        out = popxl.d2h_stream((C, C), popxl.float32, "dw")
        variables = facts.init()
        dy = grad.graph.inputs[0]
        forward, gradient = batch_serialise_fwd_and_grad(
            fwd, grad, fwd.args, STEPS, {x: stream, dy: dy_stream}, {grad.graph.outputs[0]: out}, {}, seed_input,
            io_mode="compute",
        )  # fmt: skip
        assert {x, seed_input} <= set(forward.stored_buffers)
        assert "seed" not in [t.name for t in gradient.graph.graph.inputs]
        forward.graph.bind(variables).call(0, seed)
        gradient.graph.bind(variables).call(0)
        plain = []
        for i in range(STEPS):
            step_seed, seed = ops.split_random_seed(seed)
            call = fwd.bind(variables).call_with_info(popxl.constant(XS[i]), step_seed)
            plain += grad.call(popxl.constant(DYS[i]), args=grad.grad_graph_info.inputs_dict(call))
        streams = store_all(plain)
    results, _ = run_session(ir, {stream: XS, dy_stream: DYS})
    for i in range(STEPS):
        np.testing.assert_array_equal(results[out][i], results[streams[i]][0])


def dropped_in_steps(micro_batches, at_once):
    """What a serialised graph and its gradient drop of ones, [micro_batches, N, C] each, so many of
    them a step.
    """
    ir = popxl.Ir()
    steps = ir.num_host_transfers = micro_batches // at_once
    with ir.main_graph, popxl.in_sequence():
        seed = popxl.variable(np.array([9, 4], np.uint32))
        x = popxl.TensorSpec((at_once * N, C), popxl.float32)
        seeds = popxl.TensorSpec((2,) if at_once == 1 else (at_once, 2), popxl.uint32)
        fwd = addons.GraphWithNamedArgs(
            ir.create_graph(lambda x, seed: ops.dropout(x, seed, 0.4), x, seeds)
        )
        grad = addons.autodiff(fwd, grads_required=fwd.graph.inputs[:1])
        loads = {
            t: popxl.h2d_stream(x.shape, x.dtype)
            for t in (fwd.graph.inputs[0], grad.graph.inputs[0])
        }
        stores = {
            t: popxl.d2h_stream(x.shape, x.dtype)
            for t in (fwd.graph.outputs[0], grad.graph.outputs[0])
        }
        forward, gradient = batch_serialise_fwd_and_grad(
            fwd,
            grad,
            fwd.args,
            steps,
            loads,
            stores,
            {},
            seed_input=fwd.graph.inputs[1],
            io_mode="compute",
        )
        assert forward.graph.graph.inputs[1].spec == seed.spec, "the caller gives one seed"
        forward.graph.call(0, seed)
        gradient.graph.call(0)
    ones = np.ones(x.shape if steps == 1 else (steps, *x.shape), np.float32)
    results, _ = run_session(ir, {stream: ones for stream in loads.values()})
    return [results[stream].reshape(micro_batches, N, C) for stream in stores.values()]


@pytest.mark.parametrize("at_once", [2, 3, 6])
def test_a_step_with_stacked_seeds_drops_what_as_many_steps_with_one_seed_drop(at_once):
    alone, together = dropped_in_steps(6, 1), dropped_in_steps(6, at_once)
    assert np.unique(alone[0].reshape(6, -1), axis=0).shape[0] == 6, (
        "every micro-batch has a mask of its own"
    )
    for dropped, expected in zip(together, alone):
        np.testing.assert_array_equal(dropped, expected)


def test_repeating_a_graph_keeps_variables_between_iterations_and_advances_streams():
    ir = popxl.Ir()
    ir.num_host_transfers = STEPS
    with ir.main_graph, popxl.in_sequence():
        total = popxl.variable(np.zeros(C, np.float32), name="total")
        stream, out = popxl.h2d_stream((C,), popxl.float32), popxl.d2h_stream((C,), popxl.float32)
        total += ops.host_load(stream) * 2
        ops.host_store(out, total + 1)
        assert addons.repeat_graph(ir.main_graph, 1) is ir.main_graph
    before = len(ir.main_graph.ops)
    addons.repeat_graph(ir.main_graph, STEPS)
    assert [op.definition.name for op in ir.main_graph.ops] == ["repeat"] and before > 2
    xs = normal(STEPS, C)
    results, values = run_session(ir, {stream: xs}, [ir.main_graph.variables[0]])
    np.testing.assert_allclose(results[out], np.cumsum(xs * 2, 0) + 1, rtol=1e-5)
    np.testing.assert_allclose(values[ir.main_graph.variables[0]], xs.sum(0) * 2, rtol=1e-5)


def test_grad_info_can_be_moved_to_graphs_of_the_same_order():
    ir = popxl.Ir()
    with ir.main_graph:
        fwd = ir.create_graph(lambda x: ops.tanh(x), popxl.TensorSpec((C,), popxl.float32))
        info = popxl.transforms.autodiff(fwd)
        copy = ir.create_graph(lambda x: [*ops.call(fwd, x)], popxl.TensorSpec((C,), popxl.float32))
        moved = remap_grad_info(info, copy, info.graph)
    assert moved.forward_graph is copy and moved.outputs == copy.inputs
    assert [c.connection_type for c in moved.expected_inputs] == [
        c.connection_type for c in info.expected_inputs
    ]


def refusals():
    ir = popxl.Ir()
    with ir.main_graph:
        spec = popxl.TensorSpec((C,), popxl.float32)
        graph = addons.GraphWithNamedArgs(ir.create_graph(lambda x: ops.tanh(x), spec))
        grad = addons.autodiff(graph)
        x, y = graph.graph.inputs[0], graph.graph.outputs[0]
        other = ir.create_graph(lambda x: x + 1, spec)
        stream = popxl.h2d_stream((C,), popxl.float32)
        yield (
            lambda: batch_serialise(graph, 2, {}, {}, {}, io_mode="fast"),
            "'compute', 'io' or 'io_overlapped'",
        )
        yield lambda: batch_serialise(graph, 2, {}, {}, {}), "without IO tiles"
        yield (
            lambda: batch_serialise(graph, 2, {}, {}, {}, rows=0, io_mode="compute"),
            "expected at least 1 of each",
        )
        yield (
            lambda: batch_serialise(graph, 2, {y: stream}, {}, {}, io_mode="compute"),
            "expected an input of graph",
        )
        yield (
            lambda: batch_serialise(graph, 2, {other.inputs[0]: stream}, {}, {}, io_mode="compute"),
            "an input of graph",
        )
        stored = popxl.d2h_stream((C,), popxl.float32)
        yield (
            lambda: batch_serialise(
                graph, 2, {}, {other.outputs[0]: stored}, {}, io_mode="compute"
            ),
            "input or output",
        )
        yield lambda: batch_serialise_overlapped(graph, 1, {}, {}, {}), "expected at least 2"
        yield (
            lambda: batch_serialise_fwd_and_grad(
                graph, grad, NamedTensors(), 2, {x: stream}, {}, {}, io_mode="compute"
            ),
            "got no load handle for",
        )
        again, handle = recompute_graph(grad), RemoteHandle(batch_serial_buffer(x, 2))
        dy, group = again.graph.inputs[0], ir.replica_grouping()
        for loads, streams, buffers, says in (
            ({grad.graph.inputs[0]: stream}, {}, {}, "got a handle for %Gradient"),
            ({}, {other.outputs[0]: stored}, {}, "got a handle for %add"),
            ({}, {}, {grad.graph.outputs[0]: handle}, "got a handle for %Gradient"),
            ({}, {}, {y: group}, "got a replica grouping for %tanh"),
        ):
            yield (
                lambda: batch_serialise_fwd_and_grad(
                    graph, again, NamedTensors(), 2, {dy: stream, **loads}, streams, buffers,
                    io_mode="compute",
                ),
                says,
            )  # fmt: skip
        yield lambda: addons.repeat_graph(graph.graph, 2), "expected none. Use ops.repeat"
        yield (
            lambda: addons.transforms.set_available_memory_proportion_by_ipu(ir, [2.0]),
            "from 0 to 1",
        )


@pytest.mark.parametrize("index", range(14))
def test_misuse_of_transforms_is_refused_in_words(index):
    for i, (act, says) in enumerate(refusals()):
        if i == index:
            with pytest.raises(ValueError, match=says):
                act()
            return
    raise AssertionError("one refusal per index")
