"""State: AdamW steps, remote and sharded variables, seeds, and the hints that change nothing."""

import numpy as np
import popxl
import popxl_addons as addons
import pytest
import torch
from helpers.addons_programs import normal, run_program, run_session, store_all
from popxl import ops
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.optimizers import AdamOptimizerStep
from popxl_addons.remote import load_remote, store_remote
from popxl_addons.rts import (
    all_gather_replica_sharded_graph,
    gather_replica_sharded_tensor,
    reduce_replica_sharded_graph,
    reduce_replica_sharded_tensor,
    replica_sharded_spec,
    shards_of,
)
from popxl_addons.variable_factory import NamedVariableFactories, VariableFactory

R = 4
SHAPE = (4, 6)


def numpy_adamw(w, gradients, lr, b1=0.9, b2=0.999, eps=1e-5, decay=0.01, correct=True):
    w, m, v = w.astype(np.float64), 0.0, 0.0
    for step, g in enumerate(gradients, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        mhat, vhat = (m / (1 - b1**step), v / (1 - b2**step)) if correct else (m, v)
        w = w - lr * (mhat / (np.sqrt(vhat) + eps) + decay * w)
    return w


def adam_program(gradients, tensors=(), **options):
    """Apply one AdamW step per gradient; ``tensors`` names options that are given as tensors."""

    def build(ir):
        w = popxl.variable(normal(*SHAPE), name="w")
        made = {name: popxl.variable(np.float32(options[name])) for name in tensors}
        plain = {name: value for name, value in options.items() if name not in tensors}
        specs = {name: t.spec for name, t in made.items()}
        plain.setdefault("first_order_dtype", popxl.float32)
        facts, graph = AdamOptimizerStep().create_graph(w, w.spec, **plain, **specs)
        state = facts.init_zero() if False else facts.init()
        for g in gradients:
            order = [t for t in graph.graph.inputs[2:] if t not in graph.args.values_flat()]
            graph.bind(state).call(w, popxl.variable(g), *(made[t.name] for t in order))
        return [w, *state.values_flat()]

    return run_program(build)


GRADIENTS = [normal(*SHAPE, seed=i + 1) for i in range(4)]


@pytest.mark.parametrize(
    "tensors", [(), ("lr",), ("lr", "beta1", "beta2", "eps", "weight_decay", "loss_scaling")]
)
def test_adamw_equals_its_formula_with_numbers_and_with_tensors(tensors):
    options = {
        "lr": 0.1,
        "beta1": 0.8,
        "beta2": 0.95,
        "eps": 1e-6,
        "weight_decay": 0.3,
        "loss_scaling": 8.0,
    }
    w, first, second, step = adam_program([g * 8 for g in GRADIENTS], tensors, **options)
    expected = numpy_adamw(normal(*SHAPE), GRADIENTS, 0.1, 0.8, 0.95, 1e-6, 0.3)
    np.testing.assert_allclose(w, expected, rtol=1e-4, atol=1e-5)
    assert step == 4 and second.dtype == np.float32 and first.shape == SHAPE


def test_adamw_equals_torchs():
    w, *_ = adam_program(GRADIENTS, lr=0.05, weight_decay=0.1, eps=1e-8)
    parameter = torch.nn.Parameter(torch.tensor(normal(*SHAPE)))
    optimizer = torch.optim.AdamW([parameter], lr=0.05, weight_decay=0.1, eps=1e-8)
    for g in GRADIENTS:
        parameter.grad = torch.tensor(g)
        optimizer.step()
    np.testing.assert_allclose(w, parameter.detach().numpy(), rtol=1e-5, atol=1e-5)


def test_without_bias_correction_there_is_no_step_counter_and_the_first_moment_may_be_narrow():
    w, first, second = adam_program(
        GRADIENTS, lr=0.1, bias_correction=False, first_order_dtype=popxl.float16
    )
    expected = numpy_adamw(normal(*SHAPE), GRADIENTS, 0.1, correct=False)
    np.testing.assert_allclose(w, expected, rtol=1e-2, atol=1e-2)
    assert first.dtype == np.float16 and second.dtype == np.float32


@pytest.mark.parametrize("norm", [0.5, 20.0])
def test_gradients_are_clipped_where_the_global_norm_exceeds_its_maximum(norm):
    options = {"lr": 0.1, "global_norm": norm, "global_norm_max": 2.0, "loss_scaling": 4.0}
    w, *_ = adam_program([g * 4 for g in GRADIENTS], ("global_norm",), **options)
    scale = 2.0 / max(norm, 2.0)
    np.testing.assert_allclose(
        w, numpy_adamw(normal(*SHAPE), [g * scale for g in GRADIENTS], 0.1), rtol=1e-4, atol=1e-5
    )


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("passes", ["", "-fuse_adamw"])
@pytest.mark.parametrize("rounds", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize(
    "dtype", [popxl.float32, popxl.float16, popxl.bfloat16], ids=lambda d: d.name
)
def test_an_update_whose_condition_is_false_changes_no_bit(dtype, rounds, passes, monkeypatch):
    monkeypatch.setenv("POPXL_PASSES", passes)
    start = normal(*SHAPE)
    start[0] = -0.0
    bad = np.full(SHAPE, np.nan, np.float32)
    bad[1], bad[2] = np.inf, -0.0

    def state_after(given, flags):
        def build(ir):
            w = popxl.variable(start, dtype, name="w")
            scalar = popxl.TensorSpec((), popxl.float32)
            facts, graph = AdamOptimizerStep().create_graph(
                w, popxl.TensorSpec(SHAPE, popxl.float32), lr=0.1, first_order_dtype=dtype, second_order_dtype=dtype,
                global_norm=scalar, global_norm_max=1.0, update_if=popxl.TensorSpec((), popxl.bool),
            )  # fmt: skip
            state = facts.init()
            for g, flag in zip(given, flags):
                norm = popxl.variable(np.float32(2.0 if flag else np.nan))
                graph.bind(state).call(w, popxl.variable(g), norm, popxl.variable(flag))
            return [w, *state.values_flat()]

        return [
            np.asarray(t).tobytes() for t in run_program(build, enableStochasticRounding=rounds)
        ]

    first, second, _, _ = GRADIENTS
    assert state_after([bad], [False]) == state_after([], [])
    skipping = state_after(
        [bad, first, bad, bad, second, bad], [False, True, False, False, True, False]
    )
    if not rounds:  # else each update draws from a place of its own
        assert skipping == state_after([first, second], [True, True])
    assert state_after([first, bad], [True, False]) == state_after([first], [True])
    assert state_after([first], [True]) != state_after([], [])


def test_the_norm_needs_its_maximum():
    with pytest.raises(AssertionError, match="expected both"):
        adam_program(GRADIENTS, ("global_norm",), lr=0.1, global_norm=1.0)


def test_graph_inputs_follow_the_signature_and_state_is_named():
    ir = popxl.Ir()
    with ir.main_graph:
        spec, scalar = popxl.TensorSpec(SHAPE, popxl.float32), popxl.TensorSpec((), popxl.float32)
        facts, graph = AdamOptimizerStep().create_graph(
            spec, spec, loss_scaling=scalar, lr=scalar, global_norm=scalar, global_norm_max=1.0
        )
        names = [t.name for t in graph.graph.inputs]
        assert names == [
            "var",
            "grad",
            "lr",
            "loss_scaling",
            "global_norm",
            "first_order",
            "second_order",
            "step",
        ]
        by_ref = {t.name for t in graph.graph._by_ref_inputs}
        assert by_ref == {"var", "first_order", "second_order", "step"}
        assert facts.first_order.dtype is popxl.float16 and not graph.graph.outputs


@pytest.mark.parametrize("dtype", [popxl.float32, popxl.uint8], ids=lambda d: d.name)
@pytest.mark.parametrize(
    "elements, replicas, shards", [(9, 4, 4), (10, 8, 8), (4, 8, 8), (2, 4, 2)]
)
def test_state_is_cut_as_its_variable_is_where_others_have_as_long_shards(
    elements, replicas, shards, dtype
):
    w, g = normal(elements), normal(elements, seed=1)
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph, popxl.in_sequence():
        whole, shard = popxl.replica_sharded_variable(w, name="w", shard_over=shards)
        group = ir.replica_grouping(group_size=shards)
        gradient = ops.collectives.replica_sharded_slice(popxl.variable(g), group)
        facts, graph = AdamOptimizerStep().create_graph(
            shard, gradient, lr=0.1, first_order_dtype=dtype, second_order_dtype=dtype
        )
        graph.bind(facts.init()).call(shard, gradient)

        multiplied = ir.create_graph(lambda t, x: t * x, shard, gradient)
        named = addons.GraphWithNamedArgs(multiplied)
        accumulators, _ = addons.autodiff_with_accumulation(named, multiplied.inputs[:1])
        accumulators.init()
        state = [facts.first_order, facts.second_order, accumulators["accum.t"]]
        assert [factory.shard_over for factory in state] == [shards] * 3
    _, values = run_session(ir, {}, [whole])
    tolerance = 1e-4 if dtype is popxl.float32 else 2e-2
    np.testing.assert_allclose(values[whole], numpy_adamw(w, [g], 0.1), rtol=1e-4, atol=tolerance)


def test_a_shard_says_over_how_many_replicas_it_is_cut_where_sizes_do_not():
    ir, spec = popxl.Ir(replication=4), popxl.TensorSpec((1,), popxl.float32, (2,))
    with ir.main_graph:
        with pytest.raises(ValueError, match=r"got 1 of 2 elements.*any of \[2, 4\] of 4 replicas"):
            shards_of(spec)
        assert shards_of(spec, ir.replica_grouping(group_size=2)) == 2
        module, adam = addons.Module(), AdamOptimizerStep(cache=True)
        for shards in (2, 4):
            name, zeros = f"over_{shards}", np.zeros(2, np.float32)
            t = module.add_replica_sharded_variable_input(name, lambda: zeros, shard_over=shards)
            facts, _ = adam.create_graph(t, spec, lr=0.1)
            assert (shards_of(t), facts.first_order.shard_over) == (shards, shards)


def test_a_sharded_variable_is_updated_shard_by_shard():
    w, g = normal(*SHAPE), normal(*SHAPE, seed=1)
    ir = popxl.Ir(replication=R)
    with ir.main_graph, popxl.in_sequence():
        whole, shard = popxl.replica_sharded_variable(w, name="w")
        gradient = ops.collectives.replica_sharded_slice(popxl.variable(g))
        facts, graph = AdamOptimizerStep().create_graph(
            shard, gradient, lr=0.1, first_order_dtype=popxl.float32
        )
        assert facts.first_order.shape == (6,) and facts.first_order.meta_shape == SHAPE
        graph.bind(facts.init()).call(shard, gradient)
        store_all([gather_replica_sharded_tensor(shard)])
    results, values = run_session(ir, {}, [whole])
    expected = numpy_adamw(w, [g], 0.1)
    np.testing.assert_allclose(next(iter(results.values()))[R - 1], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(values[whole], expected, rtol=1e-4, atol=1e-5)


# remote and sharded


def factories(ir, group=None):
    return NamedVariableFactories.from_dict(
        {
            "b": VariableFactory(
                iter([np.full(4, i, np.float32) for i in range(9)]),
                name="b",
                replica_grouping=group,
            ),
            "a.w": VariableFactory(
                iter([normal(*SHAPE, seed=i) for i in range(9)]), name="w", replica_grouping=group
            ),
        }
    )


def test_remote_variables_are_loaded_changed_and_stored_by_slot():
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        facts = factories(ir)
        buffers = addons.named_variable_buffers(facts, entries=1)
        variables = [facts.init_remote(buffers, entry, f"layer{entry}") for entry in range(2)]
        load, names = addons.load_remote_graph(buffers, entries=2)
        store = addons.store_remote_graph(buffers, entries=3)
        assert names == ["a.w", "b"] and load.graph.inputs[0].name == "load_index"
        assert store.graph.inputs[0].name == "store_index" and store.args.keys_flat() == names
        assert all(buffer.entries == 3 for buffer in buffers.values_flat())
        for entry in range(2):
            loaded = NamedTensors.pack(names, load.call(entry))
            store.bind(loaded.map(lambda t: t * 2)).call(entry)
        inline = load_remote(buffers, 1)
        store_remote(buffers, NamedTensors(b=inline.b + 1), 1)
    _, values = run_session(ir, {}, [t for v in variables for t in (v.a.w, v.b)])
    for entry in range(2):
        np.testing.assert_allclose(
            values[variables[entry].a.w], 2 * normal(*SHAPE, seed=entry), rtol=1e-6
        )
        np.testing.assert_array_equal(
            values[variables[entry].b], np.full(4, 2 * entry + (entry == 1))
        )
    assert variables[1].b.name == "layer1.b"


def test_sharded_remote_variables_hold_one_piece_per_replica_and_gather_whole():
    ir = popxl.Ir(replication=R)
    with ir.main_graph, popxl.in_sequence():
        group = ir.replica_grouping(stride=2)
        facts = factories(ir, group)
        buffers = addons.named_variable_buffers(facts)
        assert buffers.a.w.tensor_shape == (12,) and buffers.a.w.meta_shape == SHAPE
        variables = facts.init_remote(buffers)
        load, names = addons.load_remote_graph(buffers)
        shards = NamedTensors.pack(names, load.call(0))
        gather, gathered_names = all_gather_replica_sharded_graph(
            shards, replica_groups=facts.replica_groupings
        )
        gathered = NamedTensors.pack(gathered_names, gather.bind(shards).call())
        streams = store_all([shards.a.w, gathered.a.w])
    results, values = run_session(ir, {}, [variables.a.w])
    data = [normal(*SHAPE, seed=0), normal(*SHAPE, seed=1)]
    np.testing.assert_array_equal(values[variables.a.w], np.stack(data))
    for replica in range(R):
        np.testing.assert_array_equal(results[streams[1]][replica], data[replica % 2])
        piece = data[replica % 2].reshape(2, 12)[replica // 2]
        np.testing.assert_array_equal(results[streams[0]][replica], piece)


@pytest.mark.parametrize("op", ["add", "mean"])
@pytest.mark.parametrize(
    "case", ["equal groups", "reduce over all", "not divisible", "group of one"]
)
def test_reductions_leave_every_replica_its_shard(op, case):
    shape = (5,) if case == "not divisible" else SHAPE
    data = normal(R, *shape)
    ir = popxl.Ir(replication=R)
    with ir.main_graph:
        t = popxl.variable(data, replica_grouping=ir.replica_grouping(group_size=1))
        everyone, pairs, alone = (
            ir.replica_grouping(),
            ir.replica_grouping(group_size=2),
            ir.replica_grouping(group_size=1),
        )
        reduce_group, shard_group, members = {
            "equal groups": (pairs, pairs, 2),
            "reduce over all": (everyone, pairs, R),
            "not divisible": (everyone, pairs, R),
            "group of one": (alone, alone, 1),
        }[case]
        out = reduce_replica_sharded_tensor(t, op, reduce_group, shard_group)
        named = NamedTensors(x=t)
        groups = addons.named_replica_grouping.NamedReplicaGrouping(x=shard_group)
        graph, names = reduce_replica_sharded_graph(
            named, op, shard_groups=groups, replica_group=reduce_group
        )
        (same,) = graph.bind(named).call()
        assert names == ["x"] and same.spec == out.spec
        assert (out is t) == (case == "group of one")
        streams = store_all([out, same])
    results, _ = run_session(ir, {})
    reduce = np.mean if op == "mean" else np.sum
    for replica in range(R):
        mine = [
            r for r in range(R) if reduce_group.assignment[r] == reduce_group.assignment[replica]
        ]
        assert len(mine) == members
        expected = reduce(data[mine], axis=0)
        if case in ("equal groups", "reduce over all"):
            expected = expected.reshape(2, 12)[replica % 2]
        for stream in streams:
            np.testing.assert_allclose(results[stream][replica], expected, rtol=1e-5, atol=1e-6)


def test_specs_and_buffers_shard_only_where_elements_divide():
    ir = popxl.Ir(replication=R)
    with ir.main_graph:
        everyone = ir.replica_grouping()
        even, odd = (
            popxl.variable(np.zeros(SHAPE, np.float32)),
            popxl.variable(np.zeros(5, np.float32)),
        )
        assert replica_sharded_spec(even, everyone) == popxl.TensorSpec((6,), popxl.float32, SHAPE)
        assert replica_sharded_spec(odd, everyone) == odd.spec
        assert replica_sharded_spec(even, ir.replica_grouping(group_size=1)) == even.spec
        facts = NamedVariableFactories(
            even=VariableFactory(lambda: np.zeros(SHAPE)), odd=VariableFactory(lambda: np.zeros(5))
        )
        buffers = addons.named_variable_buffers(facts, shard_over_dict={"even": 2})
        assert (buffers.even.tensor_shape, buffers.odd.meta_shape) == ((12,), ())
        assert addons.named_variable_buffers(facts).odd.tensor_shape == (5,)
        buffers = addons.named_variable_buffers(facts, shard_over_dict=2)
        assert (buffers.even.tensor_shape, buffers.odd.tensor_shape) == ((12,), (5,))
        assert (
            addons.named_variable_buffers(facts, shard_over_dict=False).even.tensor_shape == SHAPE
        )
        assert addons.named_buffers(NamedTensors(x=even), 3).x.entries == 3
        sharded = popxl.TensorSpec((6,), popxl.float32, SHAPE)
        assert addons.create_remote_buffer(sharded, 2, everyone).meta_shape == SHAPE
        with pytest.raises(ValueError, match="expected a divisor of the"):
            addons.create_remote_buffer(odd.spec, shard_over=2)
        with pytest.raises(ValueError, match="expected a divisor of the"):
            addons.named_variable_buffers(facts, shard_over_dict={"odd": 2})
        with pytest.raises(ValueError, match="1 <= shards <= 4"):
            addons.named_variable_buffers(facts, shard_over_dict=8)
        with pytest.raises(ValueError, match="expected a dict, an int or a bool"):
            addons.named_variable_buffers(facts, shard_over_dict="all")


def test_each_replica_has_its_own_seed_which_is_kept_from_run_to_run():
    ir = popxl.Ir(replication=R)
    with ir.main_graph, popxl.in_sequence():
        variable, seed = addons.seed_variable(42)
        (stream,) = store_all([ops.random_uniform(seed, (3,))])
        seed += 1
    with popxl.Session(ir) as session:
        first, second = session.run()[stream], session.run()[stream]
        value = session.get_tensor_data(variable)
    np.testing.assert_array_equal(value, popxl.create_seeds(42, replicas=R) + 2)
    assert len(np.unique(np.concatenate([first, second]))) == 2 * R * 3
    with popxl.Ir().main_graph:
        assert addons.seed_variable(1)[0].shape_on_host == (2,)


def test_hints_are_accepted_and_change_nothing():
    ir = popxl.Ir()
    with ir.main_graph:
        store_all([popxl.variable(1.0) + 1])
    before = len(ir.main_graph.ops)
    addons.patterns.apply_pre_alias_patterns(ir, "minimal")
    addons.transforms.set_available_memory_proportion_by_ipu(ir, [0.4])
    addons.transforms.set_graph_available_memory_proportion_by_ipu(ir.main_graph, [0.4])
    addons.transforms.enable_fc_pass(ir)
    addons.transforms.disable_fc_pass(ir)
    assert len(ir.main_graph.ops) == before
    with pytest.raises(ValueError, match="expected one of no_patterns"):
        addons.patterns.apply_pre_alias_patterns(ir, "most")


def test_an_iterable_that_runs_out_is_told_with_the_variable():
    with popxl.Ir().main_graph:
        factory = VariableFactory([normal(2)], name="w")
        factory.create_tensor()
        with pytest.raises(ValueError, match="variable 'w': got no more items; expected one for"):
            factory.create_tensor()
