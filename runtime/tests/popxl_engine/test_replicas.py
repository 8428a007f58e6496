"""Replicas of one process: collectives in whole programs, values and streams of each replica, and
deadlocks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import popxl
import popxl_addons.ops.replicated_all_reduce_TP as tensor_parallel
import pytest
from helpers.op_cases import grouping
from helpers.quick import cases
from popxl import ops
from popxl.errors import GraphError
from popxl.ops import collectives
from popxl.transforms.autodiff import autodiff

GROUPS = ["00", "0000", "0101", "0011", "00000000", "01010101", "01230123", "01012323"]
IRREGULAR = ["0110", "010212", "00010111", "01102332"]
"""Groups without a constant stride."""
QUICK = ("0011", "01230123", "0110", "00010111")
over_groups = pytest.mark.parametrize(
    "digits", cases(GROUPS + IRREGULAR, lambda digits: digits in QUICK)
)


@pytest.fixture(params=["engine", "interpreter"], autouse=True)
def runner(request: Any, monkeypatch: Any) -> str:
    monkeypatch.setenv("POPXL_INTERPRET", str(int(request.param == "interpreter")))
    return str(request.param)


Build = Callable[..., Sequence[popxl.Tensor]]


def run(replicas: int, build: Build, *inputs: np.ndarray) -> list[np.ndarray]:
    """Outputs of a main graph that is ``build(ir, *loaded inputs)``; arrays are ``[replica,
    ...]``.
    """
    ir = popxl.Ir(replicas)
    given = {}
    with ir.main_graph:
        loaded = []
        for data in inputs:
            stream = popxl.h2d_stream(data.shape[1:], popxl.dtype.as_dtype(data.dtype))
            given[stream] = data if replicas > 1 else data[0]
            loaded.append(ops.host_load(stream))
        streams = []
        for t in build(ir, *loaded):
            streams.append(popxl.d2h_stream(t.shape, t.dtype))
            ops.host_store(streams[-1], t)
    with popxl.Session(ir) as session:
        results = session.run(given)
    return [results[s] for s in streams]


def values(replicas: int, *shape: int, seed: int = 0) -> np.ndarray:
    """A different array on each replica."""
    return np.random.default_rng(seed).normal(size=(replicas, *shape)).astype(np.float32)


def members(digits: str) -> list[list[int]]:
    """The group of each replica."""
    return [[r for r, digit in enumerate(digits) if digit == own] for own in digits]


def shard(x: np.ndarray, i: int, size: int) -> np.ndarray:
    """Piece i of a flattened, zero-padded array."""
    flat = np.pad(x.reshape(-1), (0, -x.size % size))
    return flat.reshape(size, -1)[i]


def by_group(
    x: np.ndarray, groups: list[list[int]], fn: Callable[[np.ndarray, int], np.ndarray]
) -> np.ndarray:
    """``fn(the group's arrays, position in the group)`` for each replica."""
    return np.stack([fn(x[group], group.index(r)) for r, group in enumerate(groups)])


# Every collective, one numpy statement each


@over_groups
def test_every_collective_of_a_program_is_its_numpy_statement(digits: str) -> None:
    replicas, size = len(digits), digits.count("0")

    def build(ir: popxl.Ir, x: popxl.Tensor) -> Sequence[popxl.Tensor]:
        group = grouping(ir, digits)
        reduced = [collectives.replicated_all_reduce(x, op, group) for op in REDUCE]
        written = collectives.replicated_all_reduce_(x * 2.0, "add", group)
        piece = collectives.replicated_reduce_scatter(x, "add", group, True)
        sliced = collectives.replica_sharded_slice(x, group)
        return [
            *reduced,
            written,
            piece,
            sliced,
            collectives.replicated_all_gather(piece, group=group),
            collectives.replicated_all_gather(x, 1, group),
            collectives.replicated_all_gather(x, 0, group, "new_axis"),
            collectives.replicated_slice(x, 1, group),
            x,
        ]

    x, groups = values(replicas, 3, 8), members(digits)
    *reduced, written, piece, sliced, whole, concat, stacked, slice_, after = run(
        replicas, build, x
    )
    for found, fn in zip(reduced, REDUCE.values()):
        np.testing.assert_allclose(
            found, by_group(x, groups, lambda g, i: fn(g)), rtol=1e-5, atol=1e-6
        )
    sums = by_group(x, groups, lambda g, i: g.sum(0))
    np.testing.assert_allclose(written, 2 * sums, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        piece, by_group(x, groups, lambda g, i: shard(g.sum(0), i, size)), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(sliced, by_group(x, groups, lambda g, i: shard(g[i], i, size)))
    np.testing.assert_allclose(whole, sums, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(
        concat, by_group(x, groups, lambda g, i: np.concatenate(list(g), 1))
    )
    np.testing.assert_array_equal(stacked, by_group(x, groups, lambda g, i: g))
    parts = by_group(x, groups, lambda g, i: np.split(g[i], size, 1)[i])
    np.testing.assert_array_equal(slice_, parts[:, :, 0] if size == 8 else parts)
    np.testing.assert_array_equal(after, x)


REDUCE: dict[Any, Callable[[np.ndarray], np.ndarray]] = {
    "add": lambda g: g.sum(0),
    "mean": lambda g: g.mean(0),
    "mul": lambda g: g.prod(0),
    "min": lambda g: g.min(0),
    "max": lambda g: g.max(0),
    "square_add": lambda g: (g * g).sum(0),
}


def test_additions_come_in_one_order_whatever_the_group(runner: str) -> None:
    """A binary tree over positions: strided and dense groups of the same values give the same
    bits.
    """

    def build(ir: popxl.Ir, x: popxl.Tensor, y: popxl.Tensor) -> Sequence[popxl.Tensor]:
        return [
            collectives.replicated_all_reduce(x, group=ir.replica_grouping(1, 4)),
            collectives.replicated_all_reduce(y, group=ir.replica_grouping(2, 4)),
        ]

    x = values(8, 1000)
    dense, strided = run(8, build, x, x[[0, 4, 1, 5, 2, 6, 3, 7]])
    np.testing.assert_array_equal(dense[0], strided[0])
    np.testing.assert_array_equal(dense[4], strided[1])


# Gradients


Gradient = Callable[[np.ndarray, np.ndarray, list[list[int]], int], np.ndarray]
GRADIENTS: dict[str, tuple[Callable[[popxl.Tensor, Any], popxl.Tensor], Gradient]] = {
    "all_gather": (
        lambda x, g: collectives.replicated_all_gather(x, 0, g),
        lambda x, dy, gs, n: np.stack([np.split(dy[r], n)[g.index(r)] for r, g in enumerate(gs)]),
    ),
    "slice": (
        lambda x, g: collectives.replicated_slice(x, 1, g),
        lambda x, dy, gs, n: by_group(
            dy.reshape(*x.shape[:2], -1), gs, lambda d, i: np.concatenate(list(d), 1)
        ),
    ),
    "sharded_slice": (
        lambda x, g: collectives.replica_sharded_slice(x, g),
        lambda x, dy, gs, n: by_group(
            dy, gs, lambda d, i: np.concatenate(list(d))[:16].reshape(2, 8)
        ),
    ),
    "identical_inputs": (
        lambda x, g: tensor_parallel.replicated_all_reduce_identical_inputs(x, group=g),
        lambda x, dy, gs, n: by_group(dy, gs, lambda d, i: d.sum(0)),
    ),
    "identical_grad_inputs": (
        lambda x, g: tensor_parallel.replicated_all_reduce_identical_grad_inputs(x, group=g),
        lambda x, dy, gs, n: dy,
    ),
    "all_reduce": (
        lambda x, g: tensor_parallel.replicated_all_reduce(x, group=g),
        lambda x, dy, gs, n: by_group(dy, gs, lambda d, i: d.sum(0)),
    ),
}


@pytest.mark.quick_every(5)
@over_groups
@pytest.mark.parametrize("name", sorted(GRADIENTS))
def test_gradients_of_collectives_are_as_documented(name: str, digits: str) -> None:
    forward, expected = GRADIENTS[name]
    replicas, size, groups = len(digits), digits.count("0"), members(digits)
    x = values(replicas, 2, 8)

    def build(ir: popxl.Ir, x: popxl.Tensor, dy: popxl.Tensor) -> Sequence[popxl.Tensor]:
        group = grouping(ir, digits)
        graph = ir.create_graph(lambda t: forward(t, group), x)
        info = autodiff(graph)
        call = ops.call_with_info(graph, x)
        return ops.call(info.graph, dy, inputs_dict=info.inputs_dict(call))

    shape = {
        "all_gather": (2 * size, 8),
        "slice": (2, 8 // size),
        "sharded_slice": (16 // size,),
    }.get(name, (2, 8))
    shape = (2,) if name == "slice" and size == 8 else shape
    dy = values(replicas, *shape, seed=1)
    (found,) = run(replicas, build, x, dy)
    np.testing.assert_allclose(found, expected(x, dy, groups, size), rtol=1e-5, atol=1e-6)


# What each replica has


def test_each_replica_has_its_variables_streams_and_seeds() -> None:
    ir = popxl.Ir(4)
    ir.num_host_transfers = 3
    start = np.arange(4, dtype=np.float32) * 100
    seeds = popxl.create_seeds(7, replicas=4)
    with ir.main_graph, popxl.in_sequence():
        alone = ir.replica_grouping(1, 1)
        v = popxl.variable(start, replica_grouping=alone)
        seed = popxl.variable(seeds, replica_grouping=alone)
        into, out = popxl.h2d_stream((), popxl.float32), popxl.d2h_stream((), popxl.float32)
        noise = popxl.d2h_stream((6,), popxl.float32)

        def body(v: popxl.TensorByRef, seed: popxl.TensorByRef) -> None:
            ops.var_updates.accumulate_(v, ops.host_load(into))
            ops.host_store(out, v)
            ops.host_store(noise, ops.random_uniform(seed, (6,)))
            seed += 1

        ops.repeat(ir.create_graph(body, v, seed), 3, v, seed)
    data = np.arange(12, dtype=np.float32).reshape(3, 4)
    with popxl.Session(ir) as session:
        results = session.run({into: data})
        np.testing.assert_array_equal(results[out], start + np.cumsum(data, 0))
        np.testing.assert_array_equal(session.get_tensor_data(v), start + data.sum(0))
        np.testing.assert_array_equal(session.get_tensor_data(seed), seeds + 3)
    draws = results[noise]
    assert len(np.unique(draws.reshape(12, -1), axis=0)) == 12
    for r in range(4):  # the same as one replica with that seed
        (alone,) = run(1, lambda ir: [ops.random_uniform(popxl.variable(seeds[r]), (6,))])
        np.testing.assert_array_equal(draws[0, r], alone)


def test_each_replica_has_its_remote_rows() -> None:
    ir = popxl.Ir(4)
    with ir.main_graph:
        groups = ir.replica_grouping(stride=2)
        buffer = popxl.remote_buffer((2,), popxl.float32, 2)
        data = np.array([[1, 2], [3, 4]], np.float32)
        v = popxl.remote_variable(data, buffer, 1, replica_grouping=groups)
        x = ops.remote_load(buffer, 1)
        ops.remote_store(
            buffer, 1, collectives.replicated_all_reduce(x, "add", ir.replica_grouping(1, 2))
        )
    with popxl.Session(ir) as session:
        session.run()
        np.testing.assert_array_equal(session.get_tensor_data(v), np.tile(data.sum(0), (2, 1)))


# Lockstep


def test_collectives_meet_in_calls_and_loops() -> None:
    def build(ir: popxl.Ir, x: popxl.Tensor) -> Sequence[popxl.Tensor]:
        def inner(t: popxl.Tensor) -> popxl.Tensor:
            return collectives.replicated_all_reduce(t, "mean") + 1.0

        def outer(t: popxl.Tensor) -> popxl.Tensor:
            (y,) = ops.call(graph, t)
            (y,) = ops.repeat(graph, 2, y)
            return y * 2.0

        graph = ir.create_graph(inner, x)
        (y,) = ops.repeat(ir.create_graph(outer, x), 3, x)
        return [y]

    x = values(4, 5)
    expected = x.mean(0)
    for _ in range(3):
        expected = (expected + 3) * 2
    (found,) = run(4, build, x)
    np.testing.assert_allclose(found, np.tile(expected, (4, 1)), rtol=1e-5)


def conditional_program(
    ir: popxl.Ir, flag: popxl.Tensor, x: popxl.Tensor, group: Any
) -> Sequence[popxl.Tensor]:
    """Reduces over a group where the flag is set."""

    def together(t: popxl.Tensor) -> popxl.Tensor:
        return collectives.replicated_all_reduce(t, group=group)

    def apart(t: popxl.Tensor) -> popxl.Tensor:
        return t * -1.0

    graphs = ir.create_graph(together, x), ir.create_graph(apart, x)
    return ops.conditional(flag, *graphs, [x], [x])


def test_groups_may_take_different_branches_around_their_own_collective() -> None:
    x = values(4, 3)
    flags = np.array([True, True, False, False])
    (found,) = run(
        4, lambda ir, f, t: conditional_program(ir, f, t, ir.replica_grouping(1, 2)), flags, x
    )
    np.testing.assert_allclose(found, np.stack([x[0] + x[1], x[0] + x[1], -x[2], -x[3]]), rtol=1e-6)


def test_replicas_of_a_group_that_disagree_are_an_error_that_names_them() -> None:
    words = (
        r"replica 0 waits at %t_all_reduce = replicated_all_reduce\(%t\) built at .*test_replicas.py:\d+ for "
        r"replicas \[0, 1\]; replica 1 waits at %t_all_reduce_all_gathered = replicated_all_gather\(.*"
        r"test_replicas.py:\d+ for replicas \[0, 1, 2, 3\].*; expected every replica of a group to reach the same "
        r"collective.*conditional"
    )

    def build(ir: popxl.Ir, f: popxl.Tensor, t: popxl.Tensor) -> Sequence[popxl.Tensor]:
        (y,) = conditional_program(ir, f, t, ir.replica_grouping(1, 2))
        return [collectives.replicated_all_gather(y)]

    with pytest.raises(GraphError, match=words):
        run(4, build, np.array([True, False, True, True]), values(4, 3))


def test_replicas_that_have_ended_are_named() -> None:
    with pytest.raises(
        GraphError, match=r"replica 0 waits at .*replicated_all_reduce.*; replicas \[1\] have ended"
    ):
        run(
            2,
            lambda ir, f, t: conditional_program(ir, f, t, None),
            np.array([True, False]),
            values(2, 3),
        )


def test_a_session_goes_on_after_a_deadlock() -> None:
    ir = popxl.Ir(2)
    with ir.main_graph:
        flags, into = popxl.h2d_stream((), popxl.bool), popxl.h2d_stream((3,), popxl.float32)
        (y,) = conditional_program(ir, ops.host_load(flags), ops.host_load(into), None)
        out = popxl.d2h_stream((3,), popxl.float32)
        ops.host_store(out, y)
    x = values(2, 3)
    with popxl.Session(ir) as session:
        with pytest.raises(GraphError, match="wait for each other"):
            session.run({flags: np.array([False, True]), into: x})
        found = session.run({flags: np.array([True, True]), into: x})[out]
    np.testing.assert_allclose(found, np.stack([x.sum(0)] * 2), rtol=1e-6)


def test_collectives_of_one_replica_change_nothing() -> None:
    def build(ir: popxl.Ir, x: popxl.Tensor) -> Sequence[popxl.Tensor]:
        piece = collectives.replicated_reduce_scatter(
            x, configure_output_for_replicated_tensor_sharding=True
        )
        group = ir.replica_grouping(1, 1)
        return [
            collectives.replicated_all_reduce(x, "mean", group),
            collectives.replicated_all_gather(piece),
            collectives.replicated_slice(x, 0, group),
        ]

    x = values(1, 2, 3)
    for found in run(1, build, x):
        np.testing.assert_array_equal(found, x[0])
