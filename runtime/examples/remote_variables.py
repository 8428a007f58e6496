"""Remote and sharded variables: state that lives outside the device, one slot per layer, and comes
when it is used.

Two replicas hold the same weights, so each keeps half of every weight (replicated tensor sharding).
"""

import numpy as np
import popxl
from popxl import ops
from popxl.ops import collectives

LAYERS, SIZE = 3, 4
ir = popxl.Ir(replication=2)
with ir.main_graph, popxl.in_sequence():
    # A slot of `whole` holds a tensor, a slot of `halves` holds this replica's half of one.
    whole = popxl.remote_buffer((SIZE,), popxl.float32, entries=LAYERS)
    halves = popxl.replica_sharded_buffer((SIZE,), popxl.float32, entries=LAYERS)
    biases = [
        popxl.remote_variable(np.full(SIZE, layer, np.float32), whole, layer)
        for layer in range(LAYERS)
    ]
    weights = [
        popxl.remote_replica_sharded_variable(
            np.arange(SIZE, dtype=np.float32) + layer, halves, layer
        )
        for layer in range(LAYERS)
    ]
    print("a slot of halves:", halves.tensor_shape, "of", halves.meta_shape)

    def layer_step(layer: popxl.Tensor, x: popxl.Tensor):
        """Bring layer `layer`, use it, change it, put it back."""
        shard = ops.remote_load(halves, layer)
        # the whole weight, for as long as it is used
        weight = collectives.replicated_all_gather(shard)
        bias = ops.remote_load(whole, layer)
        ops.remote_store(halves, layer, shard * 0.5)  # elementwise work needs the shard alone
        return layer + 1, x * weight + bias

    x_stream = popxl.h2d_stream((SIZE,), popxl.float32, name="x")
    y_stream = popxl.d2h_stream((SIZE,), popxl.float32, name="y")
    x = ops.host_load(x_stream)
    first = popxl.constant(0, popxl.int32)
    # The outputs of one iteration are the inputs of the next: the loop counts the layers itself.
    graph = ir.create_graph(layer_step, first, x)
    _, y = ops.repeat(graph, LAYERS, first, x)
    ops.host_store(y_stream, y)

with popxl.Session(ir) as session:
    ones = np.ones((2, SIZE), np.float32)  # for each replica
    for step in range(2):
        print(f"run {step}:", session.run({x_stream: ones})[y_stream][0].tolist())
for layer, weight in enumerate(weights):
    # whole on the host
    print(f"weight of layer {layer}:", session.get_tensor_data(weight).tolist())
print("bias of layer 2:", session.get_tensor_data(biases[2]).tolist())
