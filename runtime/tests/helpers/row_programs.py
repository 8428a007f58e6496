"""Programs whose remote rows do not fit the memory for rows."""

import numpy as np
import popxl
from popxl import ops

ENTRIES, SHAPE = 10, (64, 48)


def program(replicas=1):
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph, popxl.in_sequence():
        random = np.random.default_rng(3)
        buffers = [
            popxl.remote_buffer(SHAPE, dtype, ENTRIES) for dtype in (popxl.float32, popxl.float16)
        ]
        variables = [
            popxl.remote_variable(random.normal(size=SHAPE).astype(b.tensor_dtype.as_numpy()), b, i)
            for b in buffers
            for i in range(ENTRIES)
        ]
        graph = ir.create_graph(halving, popxl.constant(0, popxl.int32), buffers[1])
        ops.repeat(graph, ENTRIES, popxl.constant(0, popxl.int32))
        graph = ir.create_graph(mixing, popxl.constant(0, popxl.int32), buffers[0])
        ops.repeat(graph, ENTRIES - 1, popxl.constant(0, popxl.int32))
    return ir, variables


def halving(n: popxl.Tensor, buffer: popxl.RemoteBuffer):
    """Row n is changed in place."""
    t = ops.remote_load(buffer, n)
    ops.scaled_add_(t, t, b=-0.5)
    ops.remote_store(buffer, n, t)
    return n + 1


def mixing(n: popxl.Tensor, buffer: popxl.RemoteBuffer):
    """Row n + 1 gets row n's values beside its own."""
    first, second = ops.remote_load(buffer, n), ops.remote_load(buffer, n + 1)
    ops.remote_store(buffer, n + 1, first + second)
    ops.remote_store(buffer, n, second)
    return n + 1
