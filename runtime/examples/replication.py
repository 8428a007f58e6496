"""Replication: one program, four replicas, each with data of its own, and groups of replicas that
talk.

Replicas 0 1 | 2 3 are the pairs of `pairs`; its transpose has the groups 0 2 | 1 3.
"""

import numpy as np
import popxl
from popxl import ops
from popxl.ops import collectives

ir = popxl.Ir(replication=4)
pairs = ir.replica_grouping(stride=1, group_size=2)
across = pairs.transpose()
print("pairs ", pairs.assignment)
print("across", across.assignment)

with ir.main_graph, popxl.in_sequence():
    x_stream = popxl.h2d_stream((2,), popxl.float32, name="x")
    outputs = {
        name: popxl.d2h_stream((2,), popxl.float32, name)
        for name in ("product", "pair", "everyone")
    }

    x = ops.host_load(x_stream)
    # For a variable a grouping says who shares a value: the first axis of the data counts the
    # groups.
    weight = popxl.variable(
        np.array([[1, 1], [10, 10]]), popxl.float32, "weight", replica_grouping=pairs
    )
    product = x * weight
    # For a collective it says who takes part. Without a group all replicas do.
    pair = collectives.replicated_all_reduce(product, "add", group=pairs)
    everyone = collectives.replicated_all_reduce(pair, "mean", group=across)

    for stream, t in zip(outputs.values(), (product, pair, everyone)):
        ops.host_store(stream, t)

# With several replicas the first axis of a stream's array counts them.
data = np.array([[1, 0], [2, 0], [3, 0], [4, 5]], np.float32)
with popxl.Session(ir) as session:
    results = session.run({x_stream: data})
for name, stream in outputs.items():
    print(f"{name:8}", results[stream].tolist())
