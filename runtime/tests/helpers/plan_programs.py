"""Programs in phases, with the work, traffic and memory that their plans must show."""

from typing import Any

import numpy as np
import popxl
from popxl import ops
from popxl.ops import collectives

REPLICAS, M, K, N, ROWS = 4, 5, 7, 11, 3


def row_phase(
    n: popxl.Tensor, total: popxl.Tensor, x: popxl.Tensor, buffer: popxl.RemoteBuffer
) -> Any:
    """Adds x @ row n, summed over pairs of replicas, to the total, and stores the row doubled."""
    w = ops.remote_load(buffer, n)
    product = ops.matmul(x, w)
    pairs = n.ir.replica_grouping(stride=2, group_size=2)
    total = total + collectives.replicated_all_reduce(product, group=pairs)
    ops.remote_store(buffer, n, w + w)
    return n - 1, total


def final_phase(total: popxl.Tensor) -> popxl.Tensor:
    """A scalar from shards that are gathered from all replicas."""
    shard = collectives.replicated_reduce_scatter(total)
    return ops.sum(collectives.replicated_all_gather(shard))


def program(steps: int = 1) -> popxl.Ir:
    """Rows from the last to the first, then a scalar."""
    ir = popxl.Ir(REPLICAS)
    ir.num_host_transfers = steps
    with ir.main_graph, popxl.in_sequence(True):
        buffer = popxl.remote_buffer((K, N), popxl.float32, ROWS)
        for row in range(ROWS):
            popxl.remote_variable(np.full((K, N), row, np.float32), buffer, row)
        x = ops.host_load(popxl.h2d_stream((M, K), popxl.float32, "x"))
        last = popxl.constant(ROWS - 1, popxl.int32)
        total = popxl.constant(np.zeros((M, N), np.float32))
        _, total = ops.repeat(
            ir.create_graph(row_phase, last, total, x, buffer), ROWS, last, total, x
        )
        (result,) = ops.call(ir.create_graph(final_phase, total), total)
        ops.host_store(popxl.d2h_stream((), popxl.float32, "result"), result)
    return ir


def first_and_later_steps(steps: int) -> popxl.Ir:
    """A step, a loop of the others, which does one phase differently, and a phase at the end; two
    rows in each step.
    """
    ir = popxl.Ir()
    ir.num_host_transfers = steps
    with ir.main_graph, popxl.in_sequence(True):
        buffer = popxl.remote_buffer((K, K), popxl.float32, 2)
        rows = [
            popxl.remote_variable(np.full((K, K), row, np.float32), buffer, row) for row in range(2)
        ]
        assert rows
        stream, x = (
            popxl.d2h_stream((K, K), popxl.float32),
            popxl.constant(np.ones((K, K), np.float32)),
        )
        n = popxl.constant(0, popxl.int32)

        def forward_phase(n: popxl.Tensor, x: popxl.Tensor) -> Any:
            return n + 1, ops.matmul(x, ops.remote_load(buffer, n))

        def forward_and_store_phase(n: popxl.Tensor, x: popxl.Tensor) -> Any:
            ops.remote_store(buffer, n, x)
            return forward_phase(n, x)

        def middle_phase(x: popxl.Tensor) -> popxl.Tensor:
            return x * 0.5

        def report_phase(x: popxl.Tensor) -> None:
            ops.host_store(stream, x)

        def last_phase(x: popxl.Tensor) -> popxl.Tensor:
            return ops.sum(x)

        forward, store = (
            ir.create_graph(phase, n, x) for phase in (forward_phase, forward_and_store_phase)
        )
        middle, report = (ir.create_graph(phase, x) for phase in (middle_phase, report_phase))

        def step(x: popxl.Tensor, forward: popxl.Graph) -> popxl.Tensor:
            _, x = ops.repeat(forward, 2, popxl.constant(0, popxl.int32), x)
            (x,) = ops.call(middle, x)
            ops.call(report, x)
            return x

        x = step(x, forward)
        (x,) = ops.repeat(ir.create_graph(step, x, store), steps - 1, x)
        (total,) = ops.call(ir.create_graph(last_phase, x), x)
        ops.host_store(popxl.d2h_stream((), popxl.float32), total)
    return ir
