"""Programs from lists of plain numbers: in-place ops, views, calls, repeats, conditionals, remote
rows and streams.

Every list describes a valid program, so that hypothesis can shrink it, and the same list builds the
same program again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import popxl
from popxl import extensions, ops
from popxl.ops import collectives
from popxl.tensor import Tensor
from popxl.transforms.storage import Summaries

SHAPES = ((2, 3), (3, 2), (6,))
KINDS = (
    "add", "add_", "mul", "reshape", "reshape_", "transpose", "transpose_", "slice", "detach", "call", "repeat",
    "load", "store", "load_change_store", "host_load", "variable", "constant", "conditional", "count", "slice_",
    "split", "copy_", "load_", "concat_", "reverse_", "give",
)  # fmt: skip
COLLECTIVES = ("all_reduce", "all_reduce_", "all_gather", "reduce_scatter", "sharded_slice")
"""Kinds for programs on several replicas."""
COUNTED = ("count", "count_", "load_at", "store_at")
"""Kinds for programs whose rows follow from counters."""
ROWS = 3


def storages(t: Tensor) -> set[Tensor]:
    """What a tensor is a view of, and by-reference inputs of graphs, which may be views of each
    other.
    """
    found = set(Summaries().roots(t))
    return found | t._graph._by_ref_inputs if found & t._graph._by_ref_inputs else found


Step = tuple[str, int, int, int]


@dataclass
class Built:
    """A program with what to look at after a run."""

    ir: popxl.Ir
    inputs: dict[popxl.HostToDeviceStream, np.ndarray]
    """``[transfers, replicas, *stream.shape]``."""


class Pool:
    """Tensors of the graph that is being built."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors = list(tensors)
        self.rows: set[Tensor] = set()
        self.counter: list[Tensor] = []

    def pick(self, i: int, shape: tuple[int, ...] = ()) -> Tensor:
        """A tensor by number, of a shape if one is given."""
        fitting = [t for t in self.tensors if not shape or t.shape == shape]
        return fitting[i % len(fitting)]

    def add(self, t: Tensor) -> Tensor:
        """Put a result in."""
        self.tensors.append(t)
        return t


class Builder:
    """Builds one program, on replicas with different values."""

    def __init__(
        self,
        steps: Sequence[Step],
        graphs: Sequence[Sequence[Step]],
        replicas: int,
        dtype: popxl.dtype,
    ):
        self.ir, self.replicas, self.dtype = popxl.Ir(replicas), replicas, dtype
        self.count = 0
        self.inputs: dict[popxl.HostToDeviceStream, np.ndarray] = {}
        with self.ir.main_graph:
            self.buffers = [popxl.remote_buffer(shape, self.dtype, ROWS) for shape in SHAPES]
            for b, buffer in enumerate(self.buffers):
                for row in range(ROWS):
                    data = self.data_of_replicas(buffer.tensor_shape)
                    popxl.remote_variable(
                        data, buffer, row, dtype, f"row_{b}_{row}", replica_grouping=self.alone
                    )
            self.graphs = []
            for body in graphs:
                self.graphs.append(self.graph(body))
            pool = Pool([self.variable(s, f"v{i}") for i, s in enumerate(SHAPES)])
            is_known = any(kind in COUNTED[1:] for each in (steps, *graphs) for kind, *_ in each)
            pool.counter.append(
                popxl.constant(1, popxl.int32)
                if is_known
                else popxl.variable(1, popxl.int32, name="counter")
            )
            self.fill(pool, steps, main=True)
            self.observe(pool)

    def data(self, shape: Sequence[int]) -> np.ndarray:
        """Small different integers, so that float32 arithmetic is exact for a while."""
        self.count += 1
        return (
            np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 7 * self.count
        ) % 11 - 5

    @property
    def alone(self) -> popxl.ReplicaGrouping:
        """Every replica a group of its own."""
        return self.ir.replica_grouping(1, 1)

    def data_of_replicas(self, shape: Sequence[int]) -> np.ndarray:
        """The host array of a variable that differs on every replica."""
        values = [self.data(shape) for _ in range(self.replicas)]
        return np.stack(values) if self.replicas > 1 else values[0]

    def variable(self, shape: Sequence[int], name: str) -> Tensor:
        """A variable that differs on every replica."""
        return popxl.variable(
            self.data_of_replicas(shape), self.dtype, name=name, replica_grouping=self.alone
        )

    def graph(self, steps: Sequence[Step]) -> popxl.Graph:
        """A callable graph: one input of each shape, of which some are by reference; one output of
        each shape.

        It rounds from a seed, the last input, or has none.
        """
        graph = self.ir.create_empty_graph("body")
        with graph:
            flags = steps[0][1] if steps else 0
            inputs = [
                popxl.graph_input(s, self.dtype, f"x{i}", by_ref=bool(flags >> i & 1))
                for i, s in enumerate(SHAPES)
            ]
            pool = Pool(inputs)
            pool.counter.append(
                popxl.graph_input((), popxl.int32, "n", by_ref=bool(flags >> 3 & 1))
            )
            if flags >> 4 & 1:
                extensions.round_from(graph, popxl.graph_input((2,), popxl.uint32, "seed"))
            self.fill(pool, steps[1:], main=False)
            for i, s in enumerate(SHAPES):
                popxl.graph_output(pool.pick((steps[0][2] >> i) if steps else 0, s))
        return graph

    def fill(self, pool: Pool, steps: Sequence[Step], main: bool) -> None:
        """Add the ops of a list of steps to the current graph."""
        for kind, a, b, c in steps:
            getattr(self, f"do_{kind}")(pool, a, b, c, main)

    def do_add(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        x = pool.pick(a)
        pool.add(x + pool.pick(b, x.shape))

    def do_mul(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        x = pool.pick(a)
        pool.add(x * (0.5 if x.dtype.is_floating_point else -1))

    def do_add_(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        x = pool.pick(a)
        pool.add(ops.add_(x, pool.pick(b, x.shape)))

    def do_reshape(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        pool.add(pool.pick(a).reshape(SHAPES[b % 3]))

    def do_reshape_(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        pool.add(pool.pick(a).reshape_(SHAPES[b % 3]))

    def do_transpose(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        pool.add(pool.pick(a).transpose())

    def do_transpose_(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        pool.add(pool.pick(a).transpose_())

    def do_slice(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        x = pool.pick(a, (6,))
        pool.add(ops.concat([x[3:], x[:3]]))

    def do_slice_(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        x = pool.pick(a, (6,))
        part = ops.slice_(x, b % 4, b % 4 + 3)
        ops.add_(part, part) if c % 2 else ops.add_(
            part, ops.slice_(pool.pick(c, (6,)), c % 4, c % 4 + 3)
        )

    def do_concat_(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        """A view of parts of two tensors, or of the halves of one; sometimes it, or what it views,
        is written at once.

        No element is in it twice.
        """
        x, y = pool.pick(a, (6,)), pool.pick(b, (6,))
        if storages(x) & storages(y):
            x = y
        joined = ops.concat_([ops.slice_(x, 3, 6), ops.slice_(y, 0, 3)])
        if c % 3:
            ops.add_(joined if c % 3 == 1 else y, pool.pick(c, (6,)))
        pool.add(joined.reshape_((2, 3)) if c % 2 else joined)

    def do_reverse_(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        x = pool.add(ops.slice_(pool.pick(a), step=-1, axis=0))
        if b % 2:
            ops.add_(ops.slice_(x, c % 2, c % 2 + 1, axis=0), ops.slice_(x, 0, 1, axis=0))

    def do_split(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        first, second = ops.split(pool.pick(a, (6,)), 2)
        ops.add_(second if b % 2 else first, first)
        pool.add(ops.concat([second, first]))

    def do_copy_(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        x = pool.pick(a)
        pool.add(ops.var_updates.copy_var_update_(x, pool.pick(b, x.shape)))

    def do_load_(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        buffer = self.buffers[a % 3]
        x = pool.pick(c, buffer.tensor_shape)
        pool.add(ops.remote_load_(buffer, b % ROWS, x))

    def do_detach(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        x = pool.pick(a)
        pool.add(x.detach())

    def arguments(self, graph: popxl.Graph, pool: Pool, a: int, b: int, c: int) -> list[Tensor]:
        counter = pool.counter[a % len(pool.counter)]
        seed = popxl.constant([b, c], popxl.uint32)
        seeds = (
            [ops.create_random_seed(seed, counter) if a % 3 else seed]
            if graph.rounding_seed is not None
            else []
        )
        return [*(pool.pick(n, s) for n, s in zip((a, b, c), SHAPES)), counter, *seeds]

    def do_call(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        if self.graphs:
            graph = self.graphs[c % len(self.graphs)]
            for t in ops.call(graph, *self.arguments(graph, pool, a, b, c)):
                pool.add(t)

    def do_repeat(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        if self.graphs:
            graph = self.graphs[c % len(self.graphs)]
            for t in ops.repeat(graph, b % 4, *self.arguments(graph, pool, a, b, c)):
                pool.add(t)

    def do_conditional(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        pure = [g for g in self.graphs if not g._by_ref_inputs]
        if len(pure) > 1:
            condition = ops.equal(
                pool.counter[a % len(pool.counter)], popxl.constant(b % 3, popxl.int32)
            )
            branches = pure[a % len(pure)], pure[b % len(pure)]
            inputs = [self.arguments(graph, pool, a, b, c) for graph in branches]
            for t in ops.conditional(condition, *branches, *inputs):
                pool.add(t)

    def do_load(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        pool.rows.add(pool.add(ops.remote_load(self.buffers[a % 3], b % ROWS)))

    def do_store(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        buffer = self.buffers[a % 3]
        ops.remote_store(buffer, b % ROWS, pool.pick(c, buffer.tensor_shape))

    def do_give(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        """A store of what nothing needs after it, though something may need what it was made from
        or is a view of.
        """
        buffer = self.buffers[a % 3]
        shape = buffer.tensor_shape
        x = pool.pick(c, shape)
        fresh = x + x
        if b % 7 == 1:
            pool.add(fresh)
        given = (
            lambda: fresh,
            lambda: fresh.reshape_(shape),
            lambda: x.detach(),
            lambda: ops.cast(x, self.dtype),
            lambda: fresh.transpose().reshape(shape[::-1]).transpose() if len(shape) > 1 else fresh,
            lambda: ops.remote_load(buffer, c % ROWS),
            lambda: ops.slice_(
                ops.concat([fresh.reshape((6,)), fresh.reshape((6,))]), 6, 12
            ).reshape_(shape),
        )[b % 7]()
        ops.remote_store(buffer, b % ROWS, given)

    def do_load_change_store(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        """What an optimizer does: load a row, change it, store it.

        Sometimes something else reads the buffer in between.
        """
        buffer = self.buffers[a % 3]
        x = pool.add(ops.remote_load(buffer, b % ROWS))
        if c % 4 == 3:
            pool.add(ops.remote_load(buffer, b % ROWS))
        ops.add_(x, pool.pick(c, x.shape))
        if c % 4 == 1:
            pool.add(ops.remote_load(buffer, b % ROWS))
        ops.remote_store(buffer, (b + (c % 4 == 2)) % ROWS, x)

    def do_host_load(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        if main:
            stream = popxl.h2d_stream(SHAPES[a % 3], self.dtype)
            values = [self.data(SHAPES[a % 3]) for _ in range(self.replicas)]
            self.inputs[stream] = np.stack(values)[np.newaxis]
            pool.add(ops.host_load(stream))

    def do_variable(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        if main:
            pool.add(self.variable(SHAPES[a % 3], "extra"))

    def do_constant(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        pool.add(popxl.constant(self.data(SHAPES[a % 3]), self.dtype))

    def do_count(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        n = pool.counter[a % len(pool.counter)]
        if b % 2:
            ops.add_(n, popxl.constant(1, popxl.int32))
        else:
            pool.counter.append(n + 1)

    def do_count_(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        n = pool.counter[a % len(pool.counter)]
        ops.add_(n.reshape_((1,)), popxl.constant([1], popxl.int32))

    def do_load_at(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        pool.add(ops.remote_load(self.buffers[b % 3], self.row(pool, a)))

    def do_store_at(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        buffer = self.buffers[b % 3]
        ops.remote_store(buffer, self.row(pool, a), pool.pick(c, buffer.tensor_shape))

    def row(self, pool: Pool, n: int) -> Tensor:
        """A row number that a counter gives."""
        counter = pool.counter[n % len(pool.counter)]
        return ops.fmod(counter, popxl.constant(ROWS, popxl.int32))

    def pairs(self, n: int) -> popxl.ReplicaGrouping:
        """One of the groupings of four replicas in pairs, or all of them."""
        return [
            self.ir.replica_grouping(1, 2),
            self.ir.replica_grouping(2, 2),
            self.ir.replica_grouping(),
        ][n % 3]

    def do_all_reduce(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        pool.add(
            collectives.replicated_all_reduce(
                pool.pick(a), ("add", "max", "mean")[b % 3], self.pairs(c)
            )
        )

    def do_all_reduce_(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        x = pool.pick(a)
        pool.add(collectives.replicated_all_reduce_(x, "min", self.pairs(c)))

    def do_all_gather(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        pool.add(
            collectives.replicated_all_gather(pool.pick(a, (6,)), 0, self.pairs(c))[
                b % 7 : b % 7 + 6
            ]
        )

    def do_reduce_scatter(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        piece = collectives.replicated_reduce_scatter(pool.pick(a), "add", self.pairs(c), True)
        pool.add(collectives.replicated_all_gather(piece * 0.5, 0, self.pairs(c)))

    def do_sharded_slice(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        piece = collectives.replica_sharded_slice(pool.pick(a), self.pairs(c))
        if b % 2:
            ops.add_(piece, piece)
        pool.add(collectives.replicated_all_gather(piece, 0, self.pairs(c)))

    def observe(self, pool: Pool) -> None:
        """Store every float tensor and counter where the host sees it."""
        for t in [*pool.tensors, *pool.counter]:
            ops.host_store(popxl.d2h_stream(t.shape, t.dtype), t)


def build(
    steps: Sequence[Step],
    graphs: Sequence[Sequence[Step]],
    replicas: int = 1,
    dtype: popxl.dtype = popxl.float32,
) -> Built:
    """The program that a description gives."""
    builder = Builder(steps, graphs, replicas, dtype)
    return Built(builder.ir, builder.inputs)
