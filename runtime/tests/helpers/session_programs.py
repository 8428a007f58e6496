"""Small programs for the tests of sessions."""

from typing import Any

import numpy as np
import popxl
from popxl import ops


def counter(
    replication: int = 1, value: Any = 0.0, **options: Any
) -> tuple[popxl.Ir, popxl.tensor.Variable, Any]:
    """(program that adds one to a variable and stores it, the variable, the stream)."""
    ir = popxl.Ir(replication)
    with ir.main_graph, popxl.in_sequence():
        v = popxl.variable(np.asarray(value, np.float32), name="v", **options)
        ops.var_updates.accumulate_(v, popxl.constant(np.ones(v.shape, np.float32)))
        out = popxl.d2h_stream(v.shape, v.dtype)
        ops.host_store(out, v)
    return ir, v, out


def echo(
    shape: tuple[int, ...] = (),
    dtype: popxl.dtype = popxl.float32,
    transfers: int = 1,
    replication: int = 1,
) -> Any:
    """(program that stores what it loads, once per transfer; input stream; output stream)."""
    ir = popxl.Ir(replication)
    ir.num_host_transfers = transfers
    with ir.main_graph:
        into, out = (
            popxl.h2d_stream(shape, dtype, "words"),
            popxl.d2h_stream(shape, dtype, "result"),
        )

        def body() -> None:
            ops.host_store(out, ops.host_load(into))

        graph = ir.create_graph(body)
        ops.repeat(graph, transfers)
    return ir, into, out
