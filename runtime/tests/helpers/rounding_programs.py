"""Programs that update a variable of ones in graphs that round from a seed: functions ``(variable,
seed)``.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import popxl
from popxl import extensions, ops
from popxl.ops import var_updates

SIZE = 256
SMALL = 2.0**-9
"""Lost when it is added to 1 in bfloat16 and rounded to nearest; rounded stochastically it counts
every fourth time.
"""
SEEDS = popxl.create_seeds(42, batches_per_step=8)


def new_ir(replicas: int = 1, stochastic: bool = True) -> popxl.Ir:
    ir = popxl.Ir(replicas)
    ir._pb_ir.getSessionOptions().enableStochasticRounding = stochastic
    return ir


def add_little(x: popxl.Tensor) -> None:
    var_updates.accumulate_(x, popxl.constant(np.full(x.shape, SMALL, np.float32)))


@popxl.in_sequence()
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


class Held:
    """A graph among the arguments of a graph function."""

    def __init__(self, graph: popxl.Graph):
        self.graph = graph


def split_each_time(seed: popxl.Tensor, x: popxl.TensorByRef, graph: Held) -> popxl.Tensor:
    """A loop's body: call the graph with a seed of its own."""
    own, following = ops.split_random_seed(seed)
    ops.call(graph.graph, x, own)
    return following


@popxl.in_sequence()
def once(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    ops.call(updating(v), v, seed)


@popxl.in_sequence()
def twice(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    graph = updating(v)
    for own in ops.split_random_seed(seed):
        ops.call(graph, v, own)


@popxl.in_sequence()
def in_a_loop(v: popxl.Tensor, seed: popxl.Tensor, count: int = 3) -> popxl.Tensor:
    body = popxl.gcg().ir.create_graph(split_each_time, seed_spec(), like(v), Held(updating(v)))
    return ops.repeat(body, count, seed, v)[0]


@popxl.in_sequence()
def in_a_loop_of_one(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    in_a_loop(v, seed, 1)


@popxl.in_sequence()
def as_the_body(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    def body(seed: popxl.Tensor, x: popxl.TensorByRef) -> popxl.Tensor:
        add_little(x)
        return ops.split_random_seed(seed)[1]

    ops.repeat(seeded(body, seed_spec(), like(v), seed=0), 3, seed, v)


@popxl.in_sequence()
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


@popxl.in_sequence()
def with_a_loop_of_one(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    with_a_loop(v, seed, 1)


@popxl.in_sequence()
def with_a_loop_that_ends_the_seed(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    """Nobody else needs the seed, so that the program may drop it when the loop begins."""
    with_a_loop(v, ops.split_random_seed(seed)[1])


@popxl.in_sequence()
def with_a_call(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    def outer(x: popxl.TensorByRef, seed: popxl.Tensor) -> None:
        plain = popxl.gcg().ir.create_graph(update, like(v), seed_spec())
        add_little(x)
        ops.call(plain, x, seed)
        ops.call(plain, x, seed)

    ops.call(seeded(outer, like(v), seed_spec()), v, seed)


@popxl.in_sequence()
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


@popxl.in_sequence()
def branching(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    """A branch in a seeded graph, one of its sides with a seed of its own."""

    def side(x: popxl.Tensor, seed: popxl.Tensor) -> popxl.Tensor:
        add_little(x)
        return x

    def outer(x: popxl.TensorByRef, seed: popxl.Tensor) -> None:
        ir, (own, _) = popxl.gcg().ir, ops.split_random_seed(seed)
        plain, other = (
            ir.create_graph(side, like(v), seed_spec()),
            seeded(side, like(v), seed_spec()),
        )
        for taken in (True, False):
            condition = popxl.constant(taken, popxl.bool)
            (y,) = ops.conditional(condition, plain, other, [x, seed], [x, own])
            var_updates.copy_var_update_(x, y)

    ops.call(seeded(outer, like(v), seed_spec()), v, seed)


@popxl.in_sequence()
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


@popxl.in_sequence()
def with_views(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    """Updates through views, one of which memory cannot give."""

    def viewing(x: popxl.TensorByRef, seed: popxl.Tensor) -> None:
        rows = x.reshape_((16, SIZE // 16))
        add_little(rows)
        add_little(rows.transpose_().reshape_((SIZE,)))
        add_little(x)

    ops.call(seeded(viewing, like(v), seed_spec()), v, seed)


@popxl.in_sequence()
def narrowed(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    """A wide tensor rounded into a fresh one, as an update of what a cast gives."""

    def outer(x: popxl.TensorByRef, wide: popxl.Tensor, seed: popxl.Tensor) -> None:
        narrow = ops.cast(wide, x.dtype)
        var_updates.copy_var_update_(x, var_updates.copy_var_update_(narrow, wide))

    wide = popxl.constant(np.full(v.shape, 1 + SMALL, np.float32))
    ops.call(seeded(outer, like(v), wide.spec, seed_spec()), v, wide, seed)


def on_the_device(seed: popxl.Tensor) -> popxl.Tensor:
    """A seed that only the device can compute."""
    words = ops.cast(ops.cast(seed, popxl.int32), popxl.float32)
    return ops.cast(ops.cast(words, popxl.int32), popxl.uint32)


def from_the_device(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    in_a_loop(v, on_the_device(seed))


def of_which_a_seed_on_the_device_changes(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    of_which_the_seed_changes(v, on_the_device(seed))


@popxl.in_sequence()
def beside_others(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    """Updates that draw from the run around one that draws from a seed."""
    add_little(v)
    ops.call(updating(v), v, seed)
    add_little(v)


@popxl.in_sequence()
def saving(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    """One iteration of `in_a_loop`; the seed for the next is kept."""
    var_updates.copy_var_update_(seed, in_a_loop(v, seed, 1))


@popxl.in_sequence()
def elsewhere(v: popxl.Tensor, seed: popxl.Tensor) -> None:
    """`in_a_loop` after other updates, and inside another call and another loop."""
    other = popxl.variable(np.ones(SIZE, np.float32), popxl.bfloat16, name="other")
    add_little(other)

    def around(x: popxl.TensorByRef, y: popxl.TensorByRef, seed: popxl.Tensor) -> None:
        add_little(y)
        in_a_loop(x, seed)

    graph = popxl.gcg().ir.create_graph(around, like(v), like(other), seed_spec())
    ops.repeat(graph, 1, v, other, seed)


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
    narrowed,
    from_the_device,
    of_which_a_seed_on_the_device_changes,
    beside_others,
]
Program = Callable[[popxl.Tensor, popxl.Tensor], Any]
