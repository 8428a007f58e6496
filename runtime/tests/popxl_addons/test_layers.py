"""Layers, losses and reductions of the add-ons against torch and numpy, on one replica and split
over several.
"""

import numpy as np
import popxl
import popxl_addons as addons
import pytest
import torch
from helpers.addons_programs import normal, run_program, run_session, store_all
from helpers.op_cases import grouping
from popart import popart_exception
from popxl import ops
from popxl_addons.layers import Embedding, LayerNorm, LayerNormDistributed, Linear
from popxl_addons.layers.initial import truncated_normal
from popxl_addons.ops.cross_entropy_sharded_loss import cross_entropy_sharded_loss
from popxl_addons.ops.grad_reduce_square_add import grad_reduce_square_add
from popxl_addons.ops.layer_norm_distributed import layer_norm_distributed
from popxl_addons.ops.replicated_all_reduce_TP import (
    replicated_all_reduce,
    replicated_all_reduce_identical_grad_inputs,
    replicated_all_reduce_identical_inputs,
)
from popxl_addons.testing_utils import TensorInput, run_module
from popxl_engine.native import library as native

R = 4
N, C = 6, 8
over_groups = pytest.mark.parametrize("digits", ["0000", "0011", "0110"])
"""The group of each replica; the last have no constant stride."""


def places_of(digits):
    """Each replica's position in its group."""
    return [digits[:r].count(digit) for r, digit in enumerate(digits)]


def gradients_of(layer, *args, variables=None, dy=None):
    """Outputs of a layer, its input's and its variables' gradients, by name order of the
    variables.
    """

    def build(ir):
        tensors = [popxl.variable(a) for a in args]
        facts, graph = layer.create_graph(*tensors)
        made = facts.init() if variables is None else variables(facts)
        wanted = [t for t in graph.graph.inputs if t.dtype.is_floating_point]
        grad = addons.autodiff(graph, grads_required=wanted)
        call = graph.bind(made).call_with_info(*tensors)
        inputs = grad.grad_graph_info.inputs_dict(call)
        return [call.outputs[0], *grad.call(popxl.variable(dy), args=inputs)]

    return run_program(build)


def test_linear_and_layer_norm_give_torchs_outputs_and_gradients():
    x, dy = normal(N, C), normal(N, 5, seed=3)
    reference = torch.nn.Linear(C, 5)
    tx = torch.tensor(x, requires_grad=True)
    y = reference(tx)
    y.backward(torch.tensor(dy))

    def mapped(facts):
        made = facts.init()
        for variable, value in Linear.torch_mapping(made, reference).items():
            variable.host_value[...] = value
        return made

    got = gradients_of(Linear(5), x, variables=mapped, dy=dy)
    expected = [y.detach(), tx.grad, reference.weight.grad.T, reference.bias.grad]
    for g, e in zip(got, expected):
        np.testing.assert_allclose(g, e.numpy(), rtol=1e-5, atol=1e-5)

    norm = torch.nn.LayerNorm(C)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor(normal(C, seed=1)))
        norm.bias.copy_(torch.tensor(normal(C, seed=2)))
    weights = lambda v: LayerNorm.torch_mapping(v, norm)  # noqa: E731
    (result,) = run_module(LayerNorm(), TensorInput(x), weights=weights)
    np.testing.assert_allclose(result, norm(torch.tensor(x)).detach().numpy(), rtol=1e-5, atol=1e-5)
    assert run_module(Linear(5, bias=False), TensorInput(x))[0].shape == (N, 5)


def test_embedding_looks_up_rows_and_initial_weights_are_truncated():
    ids = np.array([0, 3, 3, 6], np.int32)
    table = normal(7, 3)
    (rows,) = run_module(
        Embedding(popxl.float32, 7, 3), TensorInput(ids), weights=lambda v: {v.weight: table}
    )
    np.testing.assert_array_equal(rows, table[ids])
    values = truncated_normal((200, 50))
    assert (
        np.abs(values).max() <= 0.04
        and abs(values.std() - 0.02 * 0.88) < 5e-4
        and values.dtype == np.float32
    )


def test_a_sharded_table_is_padded_per_slice_and_gives_zeros_for_rows_of_others():
    assert (
        Embedding.get_vocab_shard_size(50257, 4) == 12576
        and Embedding.get_vocab_shard_size(50257, 1) == 50257
    )
    np.testing.assert_array_equal(Embedding.get_offsets(50, 2), [0, 32])
    vocab, ids = 50, np.array([0, 31, 32, 49], np.int32)
    table = normal(64, 3)
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        rg = ir.replica_grouping(group_size=1)
        offsets = popxl.variable(Embedding.get_offsets(vocab, 2), replica_grouping=rg)
        facts, graph = Embedding(popxl.float32, vocab, 3, replica_grouping=rg).create_graph(
            popxl.TensorSpec((4,), popxl.int32)
        )
        weight = popxl.variable(table.reshape(2, 32, 3), replica_grouping=rg)
        (part,) = graph.call(popxl.variable(ids) - offsets, args={graph.args.weight: weight})
        whole = ops.collectives.replicated_all_reduce(part)
        streams = store_all([part, whole])
    results, _ = run_session(ir, {})
    np.testing.assert_array_equal(results[streams[0]][0], table[ids] * (ids < 32)[:, None])
    np.testing.assert_array_equal(results[streams[1]][1], table[ids])


def sharded_program(fn, *args, grouping=None, dy=None, shared=()):
    """Run ``fn`` on R replicas, each with its slice of the last axis; results and gradients,
    [replica, ...].
    """
    ir = popxl.Ir(replication=R)
    with ir.main_graph:
        each = ir.replica_grouping(group_size=1)
        group = grouping(ir) if grouping else ir.replica_grouping()
        tensors = [
            popxl.variable(a) if i in shared else popxl.variable(a, replica_grouping=each)
            for i, a in enumerate(args)
        ]
        graph = ir.create_graph(lambda *ts: fn(*ts, group), *tensors)
        wanted = [t for t in graph.inputs if t.dtype.is_floating_point]
        grad = popxl.transforms.autodiff(graph, grads_required=wanted)
        call = ops.call_with_info(graph, *tensors)
        incoming = (
            popxl.variable(dy)
            if np.ndim(dy) == len(call.outputs[0].shape)
            else popxl.variable(dy, replica_grouping=each)
        )
        gradients = ops.call(grad.graph, incoming, inputs_dict=grad.inputs_dict(call))
        streams = store_all([call.outputs[0], *gradients])
    results, _ = run_session(ir, {})
    return ir, [results[s] for s in streams]


def names_of(ir):
    return [op.definition.name for graph in ir.graphs for op in graph.ops]


@over_groups
def test_distributed_layer_norm_normalises_whole_rows_with_one_collective_each_way(digits):
    x, w, b, dy = normal(N, C) * 3 + 1, normal(C, seed=1), normal(C, seed=2), normal(N, C, seed=3)
    size, places = digits.count("0"), places_of(digits)
    cut = lambda a: addons.array_munging.shard(a, size, -1)[places]  # noqa: E731
    ir, (y, dx, dw, db) = sharded_program(
        lambda t, w, b, group: layer_norm_distributed(t, w, b, 1e-5, group),
        *map(cut, (x, w, b)),
        dy=cut(dy),
        grouping=lambda ir: grouping(ir, digits),
    )
    tx, tw, tb = (torch.tensor(a, requires_grad=True) for a in (x, w, b))
    ty = torch.nn.functional.layer_norm(tx, (C,), tw, tb)
    ty.backward(torch.tensor(dy))
    for got, expected in ((y, ty.detach()), (dx, tx.grad), (dw, tw.grad), (db, tb.grad)):
        np.testing.assert_allclose(got, cut(expected.numpy()), rtol=1e-4, atol=1e-5)
    made = [name for name in names_of(ir) if name.startswith("replicated_all")]
    assert made == ["replicated_all_gather", "replicated_all_reduce"]


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("kernels", ["native", "plain"])
@pytest.mark.parametrize("digits", ["0123", "0011", "0000"])
@pytest.mark.parametrize("mean", [1.0, 300.0, 1e4])
def test_layer_norm_of_rows_far_from_zero_errs_no_more_where_they_are_split(
    digits, mean, kernels, monkeypatch
):
    if kernels == "plain":
        monkeypatch.setattr(native, "takes", lambda *operands: False)
    shape, size, places = (16, 256), digits.count("0"), places_of(digits)
    x, w, b, dy = (
        normal(*shape) + mean,
        normal(256, seed=1),
        normal(256, seed=2),
        normal(*shape, seed=3),
    )
    x = x.astype(np.float32)
    cut = lambda a: addons.array_munging.shard(a, size, -1)[places]  # noqa: E731
    _, found = sharded_program(
        lambda t, w, b, group: layer_norm_distributed(t, w, b, 1e-5, group),
        *map(cut, (x, w, b)),
        dy=cut(dy),
        grouping=lambda ir: grouping(ir, digits),
    )
    tx, tw, tb = (torch.tensor(a.astype(np.float64), requires_grad=True) for a in (x, w, b))
    ty = torch.nn.functional.layer_norm(tx, (256,), tw, tb)
    ty.backward(torch.tensor(dy.astype(np.float64)))
    for got, expected in zip(found, (ty.detach(), tx.grad, tw.grad, tb.grad)):
        np.testing.assert_allclose(got, cut(expected.numpy()), rtol=0, atol=5e-6)


def test_the_layer_has_its_slice_of_gain_and_bias_and_costs_nothing_more_in_a_group_of_one():
    ir = popxl.Ir(replication=R)
    with ir.main_graph:
        group = ir.replica_grouping(stride=2)
        facts, _ = LayerNormDistributed(group).create_graph(popxl.TensorSpec((N, C), popxl.float32))
        assert facts.weight.replica_grouping == group.transpose()
        alone = ir.replica_grouping(group_size=1)
        _, graph = LayerNormDistributed(alone).create_graph(popxl.TensorSpec((N, C), popxl.float32))
        assert [op.definition.name for op in graph.graph.ops] == ["layer_norm"]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("x", "w"), [((2, N, C), (C,)), ((C,), (C,)), ((N, C), (N, C)), ((N, C), (1,))]
)
def test_a_distributed_layer_norm_refuses_all_but_rows(x, w, size):
    ir = popxl.Ir(replication=R)
    with ir.main_graph:
        group = ir.replica_grouping(group_size=size)
        t, weight = popxl.constant(np.zeros(x, np.float32)), popxl.constant(np.ones(w, np.float32))
        with pytest.raises(ValueError, match=r"expected two axes \[N, C/size\].* Reshape it first"):
            layer_norm_distributed(t, weight, weight, group=group)
        if len(x) == 3:
            with pytest.raises(ValueError, match="Reshape it first"):
                LayerNormDistributed(group).create_graph(t)


@pytest.mark.quick_every(5)
@over_groups
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore", [None, 5])
def test_sharded_cross_entropy_equals_torchs_on_every_replica(reduction, ignore, digits):
    size, places = digits.count("0"), places_of(digits)
    logits, labels = normal(N, 12) * 4, np.array([0, 5, 11, 3, 5, 8])
    tl = torch.tensor(logits, requires_grad=True)
    extra = {} if ignore is None else {"ignore_index": ignore}
    loss = torch.nn.functional.cross_entropy(tl, torch.tensor(labels), reduction=reduction, **extra)
    dy = normal(N, seed=4) if reduction == "none" else np.float32(2.5)
    loss.backward(torch.tensor(dy))
    offsets = 12 // size * np.array(places)
    shifted = (labels[None] - offsets[:, None]).astype(np.int32)
    args = [addons.array_munging.shard(logits, size, -1)[places], shifted]
    if ignore is not None:
        args.append((ignore - offsets).astype(np.int32))

    def fn(*ts):
        *tensors, group = ts
        ignored = tensors[2] if ignore is not None else None
        return cross_entropy_sharded_loss(tensors[0], tensors[1], ignored, group, reduction)

    ir, (got, gradient) = sharded_program(
        fn, *args, dy=dy, grouping=lambda ir: grouping(ir, digits)
    )
    for replica in range(R):
        np.testing.assert_allclose(got[replica], loss.detach().numpy(), rtol=1e-5, atol=1e-6)
    expected = addons.array_munging.shard(tl.grad.numpy(), size, -1)[places]
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
    assert names_of(ir).count("replicated_all_reduce") == 3


def test_unsigned_labels_are_ignored_by_a_number_below_zero():
    logits, labels = normal(N, 12), np.array([0, 5, -100, 3, 5, -100])
    ir = popxl.Ir()
    with ir.main_graph:
        unsigned = popxl.variable(labels.astype(np.uint32))
        loss = cross_entropy_sharded_loss(popxl.variable(logits), unsigned, -100, reduction="sum")
        out = popxl.d2h_stream(loss.shape, loss.dtype)
        ops.host_store(out, loss)
    expected = torch.nn.functional.cross_entropy(
        torch.tensor(logits), torch.tensor(labels), reduction="sum"
    )
    with popxl.Session(ir) as session:
        np.testing.assert_allclose(session.run()[out], expected.numpy(), rtol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_rows_to_ignore_count_zero_where_their_loss_is_infinite(reduction):
    logits, labels = np.zeros((3, 4), np.float32), np.array([1, 0, 2])
    logits[1] = [-np.inf, 0, 0, 0]
    tl = torch.tensor(logits, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(
        tl, torch.tensor(labels), ignore_index=0, reduction=reduction
    )
    loss.sum().backward()

    def build(ir):
        specs = [popxl.TensorSpec((3, 4), popxl.float32), popxl.TensorSpec((3,), popxl.int32)]
        graph = ir.create_graph(cross_entropy_sharded_loss, *specs, 0, reduction=reduction)
        grad = popxl.transforms.autodiff(graph, grads_required=[graph.inputs[0]])
        given = popxl.variable(logits), popxl.variable(labels.astype(np.int32))
        call = ops.call_with_info(graph, *given)
        dy = popxl.variable(np.ones(loss.shape, np.float32))
        gradient = ops.call(grad.graph, dy, inputs_dict=grad.inputs_dict(call))
        return [call.outputs[0], *gradient]

    value, gradient = run_program(build)
    np.testing.assert_allclose(value, loss.detach().numpy(), rtol=1e-6)
    np.testing.assert_allclose(gradient, tl.grad.numpy(), rtol=1e-6)


def test_cross_entropy_of_one_replica_uses_no_collective_and_survives_large_and_masked_logits():
    logits = normal(N, 12) * 100
    logits[:, 9:] = -np.inf
    labels = np.array([0, 5, 8, 3, 5, 8], np.int32)
    tl = torch.tensor(logits, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(tl, torch.tensor(labels).long())
    loss.backward()
    ir = popxl.Ir()
    with ir.main_graph:
        specs = popxl.TensorSpec((N, 12), popxl.float32), popxl.TensorSpec((N,), popxl.int32)
        graph = ir.create_graph(cross_entropy_sharded_loss, *specs)
        grad = popxl.transforms.autodiff(graph, grads_required=[graph.inputs[0]])
        call = ops.call_with_info(graph, popxl.variable(logits), popxl.variable(labels))
        gradient = ops.call(grad.graph, 1.0, inputs_dict=grad.inputs_dict(call))
        streams = store_all([call.outputs[0], *gradient])
    results, _ = run_session(ir, {})
    np.testing.assert_allclose(results[streams[0]], loss.item(), rtol=1e-6)
    np.testing.assert_allclose(results[streams[1]], tl.grad.numpy(), rtol=1e-5, atol=1e-7)
    assert not [name for name in names_of(ir) if name.startswith("replicated")]


def test_cross_entropy_with_grad_gives_loss_and_scaled_gradient():
    logits, labels = normal(N, 5), np.array([0, 4, 1, 2, 2, 3], np.int32)
    tl = torch.tensor(logits, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(tl, torch.tensor(labels).long(), ignore_index=2)
    (loss * 8).backward()

    def build(ir):
        x, t = popxl.variable(logits), popxl.variable(labels)
        return [
            *addons.cross_entropy_with_grad(x, t, 8.0, ignore_index=2),
            addons.cross_entropy(x, t, ignore_index=2),
        ]

    got, gradient, same = run_program(build)
    np.testing.assert_allclose([got, same], [loss.item()] * 2, rtol=1e-5)
    np.testing.assert_allclose(gradient, tl.grad.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("fn", "forward", "backward"),
    [
        (replicated_all_reduce_identical_inputs, lambda x: x, "sum"),
        (replicated_all_reduce_identical_grad_inputs, "sum", lambda dy: dy),
        (replicated_all_reduce, "sum", "sum"),
    ],
)
def test_tensor_parallel_all_reduces_have_the_gradient_that_their_name_says(fn, forward, backward):
    x, dy = normal(R, 3), normal(R, 3, seed=1)
    groups = [[0, 2], [1, 3]]

    def summed(a):
        return np.stack([a[next(g for g in groups if r in g)].sum(0) for r in range(R)])

    _, (y, dx) = sharded_program(
        lambda t, group: fn(t, group=group), x, grouping=lambda ir: ir.replica_grouping(2, 2), dy=dy
    )
    np.testing.assert_allclose(y, summed(x) if forward == "sum" else forward(x), rtol=1e-6)
    np.testing.assert_allclose(dx, summed(dy) if backward == "sum" else backward(dy), rtol=1e-6)


def test_a_group_of_one_adds_no_op_and_other_reductions_are_refused():
    ir = popxl.Ir()
    with ir.main_graph:
        t = popxl.variable(1.0)
        functions = (
            replicated_all_reduce_identical_inputs, replicated_all_reduce_identical_grad_inputs, replicated_all_reduce,
        )  # fmt: skip
        for fn in functions:
            assert fn(t) is t
            with pytest.raises(popart_exception, match="expected 'add'"):
                fn(t, op="max")
        assert not ir.main_graph.ops
        with pytest.raises(ValueError, match="expected 'mean', 'sum' or 'none'"):
            cross_entropy_sharded_loss(t, t, reduction="other")
        with pytest.raises(ValueError, match=r"expected two axes \[N, C\]"):
            LayerNorm().create_graph(popxl.TensorSpec((2, 3, 4), popxl.float32))


@pytest.mark.parametrize("dtype", [popxl.float32, popxl.float16])
def test_square_sums_undo_the_loss_scaling(dtype):
    data = normal(50).astype(dtype.as_numpy()) * 100

    def build(ir):
        t = popxl.variable(data)
        by_tensor = grad_reduce_square_add(t, popxl.variable(16.0))
        return [grad_reduce_square_add(t, 1), grad_reduce_square_add(t, 16), by_tensor]

    plain, scaled, by_tensor = run_program(build)
    expected = (data.astype(np.float64) ** 2).sum()
    np.testing.assert_allclose([plain, scaled * 256, by_tensor * 256], [expected] * 3, rtol=1e-5)
    assert plain.dtype == np.float32 and plain.shape == ()


def test_square_sums_undo_a_scaling_whose_square_float32_does_not_have():
    def build(ir):
        t = popxl.variable(np.array([3e18, 4e18], np.float32))
        return [grad_reduce_square_add(t, s) for s in (1e20, popxl.variable(np.float32(1e20)))]

    np.testing.assert_allclose(run_program(build), 25e-4, rtol=1e-5)


def test_host_loads_and_stores_make_their_streams():
    ir = popxl.Ir()
    with ir.main_graph:
        data, stream, t = addons.host_load([1, 2, 3], popxl.float32, "x")
        out = addons.host_store(t * 2)
    assert (stream.tensor_id, t.name, out.tensor_id) == ("x_stream", "x", "mul_stream")
    results, _ = run_session(ir, {stream: data})
    np.testing.assert_array_equal(results[out], [2, 4, 6])


def test_host_loads_name_a_number_that_is_cut_off():
    with popxl.Ir().main_graph:
        with pytest.warns(RuntimeWarning, match=r"host_load 'x': got 1.5 at \[1\] for int32"):
            data, *_ = addons.host_load([1, 1.5], popxl.int32, "x")
    assert data.tolist() == [1, 1]
