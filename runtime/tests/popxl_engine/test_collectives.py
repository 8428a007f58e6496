"""Collectives over several replicas, one numpy statement each; their gradients; the order of
additions.
"""

import weakref

import numpy as np
import popxl
import pytest
import torch
from helpers.op_cases import grouping
from popxl import ops
from popxl.extensions import wide_all_reduce, wide_reduce_scatter
from popxl.opdef import op_cost
from popxl.ops.collectives import (
    all_reduce,
    all_reduce_identical_grad_inputs,
    all_reduce_identical_inputs,
    replica_sharded_slice,
    replicated_all_gather,
    replicated_all_reduce,
    replicated_all_reduce_,
    replicated_reduce_scatter,
    replicated_slice,
)  # fmt: skip
from popxl.transforms.autodiff import autodiff
from popxl_engine.interpreter import Cell, Interpreter
from popxl_engine.kernels.collectives import (
    after_reduction,
    before_reduction,
    by_tree,
    pairing,
    reduce,
)
from popxl_engine.kernels.registry import KERNELS
from popxl_engine.machine import tree_reduction
from popxl_engine.machine.lockstep import run_lockstep
from popxl_engine.machine.machine import Machine
from popxl_engine.machine.tree_reduction import TreeReduction

REPLICAS = 8
GROUPS = ["00000000", "00112233", "01012323", "01230123", "01010101", "01234567"]
IRREGULAR = ["01102332", "00010111", "01201233", "01001101"]
"""Groups without a constant stride: within a group, between groups, or both."""
QUICK = ("00000000", "00112233", "01230123", "01102332", "00010111")
over_groups = pytest.mark.parametrize(
    "groups, size",
    [
        pytest.param(digits, digits.count("0"), marks=[] if digits in QUICK else [pytest.mark.slow])
        for digits in GROUPS + IRREGULAR
    ],
)


def run_on_replicas(graph, inputs):
    """results[replica][output] of a graph, for inputs[replica][input]."""
    replicas = Machine((), range(len(inputs))).replicas
    programs = {
        r: Interpreter(replicas[r]).graph(
            graph, [Cell.new(torch.from_numpy(np.asarray(t))) for t in tensors]
        )
        for r, tensors in enumerate(inputs)
    }
    results = run_lockstep(programs)
    return [[cell.read().numpy() for cell in results[r]] for r in range(len(inputs))]


def values(*shape, dtype=np.float32):
    """One array per replica."""
    return np.random.default_rng(0).uniform(-1, 1, (REPLICAS, *shape)).astype(dtype)


def make_graph(fn, *specs):
    ir = popxl.Ir(replication=REPLICAS)
    return ir.create_graph(fn, *specs), ir


def run_one(fn, x, *, dtype=popxl.float32):
    """results[replica] of a function of one tensor and the Ir."""
    graph, _ = make_graph(lambda t: fn(t, t.ir), popxl.TensorSpec(x.shape[1:], dtype))
    return [r[0] for r in run_on_replicas(graph, [[x[i]] for i in range(REPLICAS)])]


def members_of(groups):
    return [[r for r, digit in enumerate(groups) if digit == own] for own in groups]


def shard_of(array, position, size):
    flat = array.reshape(-1)
    length = -(-flat.size // size)
    return np.pad(flat, (0, length * size - flat.size)).reshape(size, length)[position]


@over_groups
@pytest.mark.parametrize("op", ["add", "mean", "mul", "min", "max", "square_add"])
def test_all_reduce_reduces_over_the_group(groups, size, op):
    x = values(3, 2)
    results = run_one(lambda t, ir: replicated_all_reduce(t, op, grouping(ir, groups)), x)
    oracle = {"add": np.sum, "mean": np.mean, "mul": np.prod, "min": np.min, "max": np.max}
    for r, members in enumerate(members_of(groups)):
        expected = (
            (x[members] ** 2).sum(0) if op == "square_add" else oracle[op](x[members], axis=0)
        )
        np.testing.assert_allclose(results[r], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op, oracle", [("and", np.all), ("or", np.any)])
def test_all_reduce_of_booleans_is_all_and_any(op, oracle):
    x = np.random.default_rng(1).uniform(size=(REPLICAS, 50)) < {"and": 0.9, "or": 0.1}[op]
    for result in run_one(lambda t, ir: replicated_all_reduce(t, op), x, dtype=popxl.bool):
        np.testing.assert_array_equal(result, oracle(x, axis=0))


def test_all_reduce_of_unsigned_integers_wraps_like_numpy():
    x = np.random.default_rng(1).integers(0, 2**32, (REPLICAS, 5)).astype(np.uint32)
    for result in run_one(lambda t, ir: replicated_all_reduce(t), x, dtype=popxl.uint32):
        np.testing.assert_array_equal(result, x.sum(0, dtype=np.uint32))


@pytest.mark.parametrize("op, oracle", [("min", np.min), ("max", np.max)])
def test_unsigned_integers_from_half_their_range_on_are_compared_as_such(op, oracle):
    x = np.random.default_rng(1).integers(0, 2**64, (REPLICAS, 50), dtype=np.uint64)
    for result in run_one(lambda t, ir: replicated_all_reduce(t, op), x, dtype=popxl.uint64):
        np.testing.assert_array_equal(result, oracle(x, axis=0))
    ts = list(map(torch.from_numpy, x))
    folded = TreeReduction(REPLICAS, pairing("replicated_all_reduce", op))
    for position, t in enumerate(ts):
        folded.add(position, [t])
    np.testing.assert_array_equal(reduce(folded, op), oracle(x, axis=0))
    compared = getattr(torch.stack([before_reduction(t, op) for t in ts]), f"a{op}")(0)
    found = after_reduction(compared, torch.uint64, op, REPLICAS)
    np.testing.assert_array_equal(found, oracle(x, axis=0))


@over_groups
def test_all_reduce_in_place_changes_the_operand(groups, size):
    def fn(t, ir):
        u = t * 2.0
        replicated_all_reduce_(u, "add", grouping(ir, groups))
        return u

    x = values(4)
    for result, members in zip(run_one(fn, x), members_of(groups)):
        np.testing.assert_allclose(result, 2 * x[members].sum(0), rtol=1e-5, atol=1e-6)


@over_groups
@pytest.mark.parametrize("shape", [(4, 2), (3, 3), ()])
def test_reduce_scatter_gives_each_member_its_shard(groups, size, shape):
    x = values(*shape)
    results = run_one(lambda t, ir: replicated_reduce_scatter(t, "add", grouping(ir, groups)), x)
    for r, members in enumerate(members_of(groups)):
        expected = shard_of(x[members].sum(0), members.index(r), size)
        np.testing.assert_allclose(results[r], expected, rtol=1e-5, atol=1e-6)


def rounded(x, dtype):
    """float32 numbers to the nearest of a 16-bit type, ties to the even one."""
    if dtype is popxl.float16:
        return x.astype(np.float16).astype(np.float32)
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def tree_mean(x):
    """The mean in float32 by a binary tree over positions."""
    level = list(x)
    while len(level) > 1:
        pairs = [a + b for a, b in zip(level[::2], level[1::2])]
        level = pairs + level[len(pairs) * 2 :]
    return level[0] / np.float32(len(x))


@over_groups
@pytest.mark.parametrize("dtype", [popxl.bfloat16, popxl.float16], ids=["bfloat16", "float16"])
def test_wide_reductions_are_float32_sums_of_rounded_numbers(groups, size, dtype):
    x = values(3, 5)

    def fn(t, ir):
        group, narrow = grouping(ir, groups), ops.cast(t, dtype)
        return [wide_all_reduce(narrow, "mean", group), wide_reduce_scatter(narrow, "mean", group)]

    graph, _ = make_graph(lambda t: fn(t, t.ir), popxl.TensorSpec((3, 5), popxl.float32))
    results = run_on_replicas(graph, [[x[i]] for i in range(REPLICAS)])
    for r, members in enumerate(members_of(groups)):
        expected = tree_mean(rounded(x[members], dtype))
        np.testing.assert_array_equal(results[r][0], expected)
        np.testing.assert_array_equal(
            results[r][1], shard_of(expected, members.index(r), len(members))
        )


def test_a_wide_shard_gathers_to_the_whole():
    def fn(t, ir):
        shard = wide_reduce_scatter(ops.cast(t, popxl.bfloat16), "mean")
        assert (shard.dtype, shard.meta_shape) == (popxl.float32, (3, 5))
        return replicated_all_gather(shard)

    x = values(3, 5)
    for result in run_one(fn, x):
        np.testing.assert_array_equal(result, tree_mean(rounded(x, popxl.bfloat16)))


@over_groups
@pytest.mark.parametrize("shape", [(4, 2), (3, 3), (2,)])
def test_shards_of_a_slice_gather_to_the_whole_again(groups, size, shape):
    def fn(t, ir):
        group = grouping(ir, groups)
        shard = replica_sharded_slice(t, group)
        assert shard.meta_shape == t.shape and shard.shape == (-(-t.nelms // size),)
        whole = replicated_all_gather(shard, group=group)
        assert whole.shape == t.shape and whole.meta_shape == ()
        return whole

    x = np.repeat(values(*shape)[:1], REPLICAS, 0)
    for result in run_one(fn, x):
        np.testing.assert_array_equal(result, x[0])


@over_groups
def test_sharded_slice_takes_the_members_own_piece_and_reduces_nothing(groups, size):
    x = values(3, 3)
    results = run_one(lambda t, ir: replica_sharded_slice(t, grouping(ir, groups)), x)
    for r, members in enumerate(members_of(groups)):
        np.testing.assert_array_equal(results[r], shard_of(x[r], members.index(r), size))


@pytest.mark.parametrize("shape", [(16,), (3, 7), (5, 5)])
def test_squared_norms_of_shards_are_those_of_the_whole(shape):
    x = values(*shape)
    results = run_one(
        lambda t, ir: ops.lamb_square(replicated_reduce_scatter(t, "add", None, True)), x
    )
    np.testing.assert_allclose(results, [(x.sum(0) ** 2).sum()] * REPLICAS, rtol=1e-5)
    whole = run_one(lambda t, ir: ops.lamb_square(t), x)
    np.testing.assert_allclose(whole, (x**2).reshape(REPLICAS, -1).sum(1), rtol=1e-5)


@pytest.mark.parametrize(
    "groups, shape", [("00112233", (16,)), ("01010101", (3,)), ("00000000", (3,))]
)
def test_squared_norms_of_shards_on_unknown_replicas_are_refused(groups, shape):
    def norm(t, ir):
        return ops.lamb_square(replica_sharded_slice(t, grouping(ir, groups)))

    with pytest.raises(
        ValueError, match=r"expected one of 8 shards.*replicated_all_reduce over the group"
    ):
        run_one(norm, values(*shape))


def test_reduce_scatter_configured_for_sharding_carries_the_meta_shape():
    def fn(t, ir):
        shard = replicated_reduce_scatter(t, "mean", None, True)
        assert shard.meta_shape == (3, 5)
        return replicated_all_gather(shard * 2.0)

    x = values(3, 5)
    for result in run_one(fn, x):
        np.testing.assert_allclose(result, 2 * x.mean(0), rtol=1e-5, atol=1e-6)


@over_groups
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_all_gather_concatenates_in_group_order(groups, size, axis):
    x = values(2, 3)
    results = run_one(lambda t, ir: replicated_all_gather(t, axis, grouping(ir, groups)), x)
    for result, members in zip(results, members_of(groups)):
        np.testing.assert_array_equal(result, np.concatenate(list(x[members]), axis))


@over_groups
def test_all_gather_stacks_on_a_new_axis(groups, size):
    x = values(2, 3)
    results = run_one(
        lambda t, ir: replicated_all_gather(t, 0, grouping(ir, groups), "new_axis"), x
    )
    for result, members in zip(results, members_of(groups)):
        np.testing.assert_array_equal(result, x[members])


@over_groups
@pytest.mark.parametrize("axis", [0, -1])
def test_slice_takes_the_members_part_of_an_axis_and_drops_axes_of_one(groups, size, axis):
    x = values(8, 16)
    results = run_one(lambda t, ir: replicated_slice(t, axis, grouping(ir, groups)), x)
    for r, members in enumerate(members_of(groups)):
        expected = np.split(x[r], size, axis)[members.index(r)]
        np.testing.assert_array_equal(
            results[r], expected[0] if expected.shape[axis] == 1 else expected
        )


def test_results_are_one_tensor_for_all_members_and_who_writes_has_a_copy():
    def fn(t, ir):
        y = replicated_all_reduce(t)
        y += replicated_slice(popxl.constant(np.arange(8), popxl.float32), 0)
        z = replicated_all_gather(t)
        z += y
        return z

    x = values(1)
    for r, result in enumerate(run_one(fn, x)):
        np.testing.assert_allclose(result, x[:, 0] + x.sum() + r, rtol=1e-5)
    for name, attrs in (
        ("replicated_all_reduce", ("add", None)),
        ("replicated_all_gather", (0, None, "concat", ())),
    ):
        results = KERNELS[name]([torch.ones(3) for _ in range(4)], *attrs)
        assert len(results) == 4 and len({r.data_ptr() for r in results}) == 1


# Order of additions


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7, 8])
def test_additions_are_a_fixed_binary_tree_over_positions(size):
    ts = [torch.tensor([float(v)]) for v in (1e8, 1.0, -1e8, 1.0, 3e-8, 1e8, 7.0, -1e8)][:size]

    def tree(leaves):
        if len(leaves) == 1:
            return leaves[0]
        half = 1
        while half * 2 < len(leaves):
            half *= 2
        return tree(leaves[:half]) + tree(leaves[half:])

    assert torch.equal(reduce(ts, "add"), tree(ts))


def test_16_bit_values_are_reduced_in_float32():
    ts = [torch.tensor([256.0], dtype=torch.bfloat16)] + [
        torch.tensor([1.0], dtype=torch.bfloat16)
    ] * 7
    assert float(reduce(ts, "add")) == float(torch.tensor(263.0).bfloat16())
    assert float(reduce([torch.tensor([6e4], dtype=torch.float16)] * 4, "mean")) == float(
        torch.tensor(6e4).half()
    )


@pytest.mark.parametrize("size", range(2, 10))
def test_operands_that_are_folded_in_any_order_give_the_same_bits_and_few_are_held(size):
    generator = np.random.default_rng(size)
    for dtype, op, result in (
        (torch.float32, "add", None),
        (torch.bfloat16, "mean", None),
        (torch.bfloat16, "mean", torch.float32),
        (torch.int32, "max", None),
        (torch.uint32, "mul", None),
    ):
        ts = [torch.from_numpy(generator.uniform(0, 100, 50)).to(dtype) for _ in range(size)]
        for order in (range(size), generator.permutation(size)):
            folded, held = TreeReduction(size, pairing("replicated_all_reduce", op)), []
            for position in order:
                folded.add(int(position), [ts[position]])
                held.append(len(folded._nodes))
            assert torch.equal(reduce(folded, op, result), reduce(ts, op, result))
            assert order is not range(size) or max(held) <= np.ceil(np.log2(size))


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("op", ["add", "mean", "square_add", "min"])
def test_large_operands_are_reduced_in_pieces_with_the_same_bits(op, size):
    for dtype in (torch.float32, torch.float16):
        ts = [torch.randn(3, 2**16 + 7).to(dtype).t() for _ in range(size)]
        assert torch.equal(reduce(ts, op), by_tree(ts, op))
        wide = reduce(ts, op, torch.float32)
        assert wide.dtype is torch.float32 and torch.equal(wide, by_tree(ts, op, torch.float32))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
@pytest.mark.parametrize(
    "op, oracle", [("add", np.add), ("mean", lambda a, b: (a + b) / 2), ("max", np.maximum)]
)
def test_two_large_operands_are_numpys_pair_and_stay_as_they_are(op, oracle, dtype):
    a, b = (np.random.default_rng(s).normal(0, 9, (3, 2**16)).astype(dtype) for s in range(2))
    operands = [torch.from_numpy(x.copy()) for x in (a, b)]
    np.testing.assert_array_equal(reduce(operands, op).numpy(), oracle(a, b).astype(dtype))
    for operand, x in zip(operands, (a, b)):
        np.testing.assert_array_equal(operand.numpy(), x)


@pytest.mark.parametrize(
    "make", [replicated_all_reduce, replicated_reduce_scatter, wide_all_reduce, wide_reduce_scatter]
)
def test_large_operands_that_replicas_need_no_more_are_let_go_of_as_they_come(make, monkeypatch):
    dtype = popxl.bfloat16 if make in (wide_all_reduce, wide_reduce_scatter) else popxl.float32

    def program():
        ir = popxl.Ir(replication=REPLICAS)
        with ir.main_graph, popxl.in_sequence():
            into = popxl.h2d_stream((40,), popxl.float32)
            y = make(ops.cast(ops.host_load(into) * 3.0, dtype), "mean")
            out = popxl.d2h_stream(y.shape, y.dtype)
            ops.host_store(out, y)
        with popxl.Session(ir, "cpu") as session:
            return session.run({into: values(40)})[out]

    alive, operands, add = [], [], TreeReduction.add

    def watched(folding, position, given):
        operands.append(weakref.ref(given[0]))
        add(folding, position, given)
        alive.append(sum(operand() is not None for operand in operands))

    expected = program()
    monkeypatch.setattr(TreeReduction, "add", watched)
    np.testing.assert_array_equal(program(), expected)
    assert not alive  # small ones wait for each other
    monkeypatch.setattr(tree_reduction, "FOLDED_BYTES", 1)
    np.testing.assert_array_equal(program(), expected)
    assert alive == [1, 0, 1, 0, 1, 0, 1, 0]


# Gradients


def gradient_on_replicas(fn, x):
    """(results, dy, gradient of the input), each by replica, for a random dy."""
    graph, _ = make_graph(lambda t: fn(t, t.ir), popxl.TensorSpec(x.shape[1:], popxl.float64))
    info = autodiff(graph)
    assert all(c.connection_type.name == "FwdGrad" for c in info.expected_inputs)
    dy = np.random.default_rng(3).uniform(-1, 1, (REPLICAS, *graph.outputs[0].shape))
    results = run_on_replicas(graph, [[x[i]] for i in range(REPLICAS)])
    gradients = run_on_replicas(info.graph, [[dy[i]] for i in range(REPLICAS)])
    return [r[0] for r in results], dy, [g[0] for g in gradients]


@over_groups
def test_gradient_of_all_gather_is_the_members_own_slice(groups, size):
    x = values(2, 3, dtype=np.float64)
    for form, axis in (("concat", 1), ("new_axis", 0)):
        _, dy, gradients = gradient_on_replicas(
            lambda t, ir: replicated_all_gather(t, axis, grouping(ir, groups), form), x
        )
        for r, members in enumerate(members_of(groups)):
            pieces = np.split(dy[r], size, axis) if form == "concat" else list(dy[r])
            np.testing.assert_array_equal(gradients[r], pieces[members.index(r)])


@over_groups
def test_gradient_of_gathered_shards_is_the_members_shard_gathered(groups, size):
    def fn(t, ir):
        group = grouping(ir, groups)
        return replicated_all_gather(replica_sharded_slice(t, group), group=group)

    x = values(3, 3, dtype=np.float64)
    _, dy, gradients = gradient_on_replicas(fn, x)
    for gradient, members in zip(gradients, members_of(groups)):
        pieces = [shard_of(dy[m], i, size) for i, m in enumerate(members)]
        np.testing.assert_array_equal(gradient, np.concatenate(pieces)[:9].reshape(3, 3))


@over_groups
def test_gradient_of_a_slice_is_the_members_gradients_gathered(groups, size):
    x = values(3, 8, dtype=np.float64)
    _, dy, gradients = gradient_on_replicas(
        lambda t, ir: replicated_slice(t, 1, grouping(ir, groups)), x
    )
    for gradient, members in zip(gradients, members_of(groups)):
        np.testing.assert_array_equal(
            gradient, np.concatenate([dy[m].reshape(3, -1) for m in members], 1)
        )


@pytest.mark.parametrize(
    "make", [replicated_all_reduce, replicated_reduce_scatter, wide_all_reduce, wide_reduce_scatter]
)
def test_plain_reductions_refuse_to_be_differentiated(make):
    graph, _ = make_graph(lambda t: make(t), popxl.TensorSpec((4,), popxl.float32))
    with pytest.raises(popxl.errors.GraphError, match="declared not differentiable"):
        autodiff(graph)


# Virtual devices


@pytest.mark.parametrize(
    "make, forward, backward",
    [
        (all_reduce, True, True),
        (all_reduce_identical_inputs, False, True),
        (all_reduce_identical_grad_inputs, True, False),
    ],
)
def test_reductions_between_devices_reduce_forward_and_backward_as_named(make, forward, backward):
    def fn(a, b, c):
        return make([a, b, c], [0, 1, 2])

    spec = popxl.TensorSpec((4,), popxl.float64)
    graph = popxl.Ir().create_graph(fn, spec, spec, spec)
    info = autodiff(graph)
    x = values(4, dtype=np.float64)[:3]
    (results,), (gradients,) = (run_on_replicas(g, [list(x)]) for g in (graph, info.graph))
    for got, reduced in ((results, forward), (gradients, backward)):
        for i in range(3):
            np.testing.assert_allclose(got[i], x.sum(0) if reduced else x[i], rtol=1e-12)


def test_reductions_between_devices_find_the_devices_of_their_operands():
    def fn(a):
        with popxl.ipu(0):
            b = a + 1.0
        with popxl.ipu(1):
            c = a + 2.0
        return all_reduce([b, c])

    graph = popxl.Ir().create_graph(fn, popxl.TensorSpec((1,), popxl.float32))
    ((first, second),) = run_on_replicas(graph, [[np.array([1.0], np.float32)]])
    assert first == second == 5.0


# Groups and costs


def test_collectives_refuse_groups_that_they_cannot_use():
    graph, ir = make_graph(lambda t: t, popxl.TensorSpec((3,), popxl.float32))
    with graph, pytest.raises(ValueError, match="a multiple of the group's size"):
        replicated_slice(graph.inputs[0])
    with graph, pytest.raises(ValueError, match="expected one of Ir"):
        replicated_all_gather(
            graph.inputs[0], group=popxl.Ir(replication=REPLICAS).replica_grouping()
        )
    with graph, pytest.raises(ValueError, match="expected a shard of 1 / 8"):
        shard = replica_sharded_slice(graph.inputs[0], ir.replica_grouping(1, 2))
        replicated_all_gather(shard)


def test_costs_are_the_bytes_that_a_ring_sends():
    def fn(t):
        group = t.ir.replica_grouping(1, 4)
        return [
            replicated_all_reduce(t, "add", group),
            replicated_reduce_scatter(t, "add", group),
            replicated_all_gather(t, 0, group),
            replica_sharded_slice(t, group),
            replicated_all_reduce(t, "add", t.ir.replica_grouping(1, 1)),
            narrow := ops.cast(t, popxl.bfloat16),
            wide_all_reduce(narrow, "add", group),
            wide_reduce_scatter(narrow, "add", group),
        ]

    graph, _ = make_graph(fn, popxl.TensorSpec((100,), popxl.float32))
    found = [op_cost(op).bytes for op in graph.ops]
    assert found[:5] == [2 * 300, 300, 1200, 2 * 100, 0]
    assert found[6:] == [150 + 300, 150]


def test_unknown_reductions_are_refused_by_name():
    assert ops.collectives.to_collective_op("mean").value == "mean"
    with pytest.raises(ValueError, match="got 'average'; expected one of add, mean, mul"):
        ops.collectives.to_collective_op("average")
