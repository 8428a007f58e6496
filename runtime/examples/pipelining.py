"""Pipelining: a model cut into stages on two devices, and micro-batches that follow each other
through them.

Stage 0 and 1 are the forward pass of two layers, stage 2 and 3 their backward pass. Then the
weights move, once.
"""

import numpy as np
import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.layers import Linear

MICRO_BATCHES, MICRO_BATCH, WIDTH, CLASSES = 8, 4, 6, 3


class Hidden(addons.Module):
    """tanh(x @ weight + bias), [..., WIDTH] -> [..., WIDTH]."""

    def __init__(self):
        super().__init__()
        self.linear = Linear(WIDTH)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """Add the layer to the current graph."""
        return ops.tanh(self.linear(x))


np.random.seed(0)
ir = popxl.Ir()
ir.num_host_transfers = MICRO_BATCHES
with ir.main_graph, popxl.in_sequence():
    x_stream = popxl.h2d_stream((MICRO_BATCH, WIDTH), popxl.float32, name="x")
    label_stream = popxl.h2d_stream((MICRO_BATCH,), popxl.int32, name="label")
    loss_stream = popxl.d2h_stream((), popxl.float32, name="loss")

    layers = []  # (variables, accumulated gradients, forward graph, backward graph) of each
    for module in (Hidden(), Linear(CLASSES)):
        facts, forward = module.create_graph(x_stream.spec)
        mean_facts, backward = addons.autodiff_with_accumulation(
            forward, forward.args.tensors, grads_required=forward.graph.inputs[:1]
        )
        layers.append((facts.init(), mean_facts.init(), forward, backward))
    (weights0, mean0, forward0, backward0), (weights1, mean1, forward1, backward1) = layers

    with addons.pipelined_execution(MICRO_BATCHES) as pipeline:
        with pipeline.stage(0), popxl.ipu(0):
            call0 = forward0.bind(weights0).call_with_info(ops.host_load(x_stream))
            x = call0.outputs[0].copy_to_ipu(1)
        with pipeline.stage(1), popxl.ipu(1):
            call1 = forward1.bind(weights1).call_with_info(x)
            label = ops.host_load(label_stream)
            loss, dy = addons.cross_entropy_with_grad(call1.outputs[0], label)
            ops.host_store(loss_stream, loss)
        with pipeline.stage(2), popxl.ipu(1):
            # Micro-batches have followed meanwhile: a later stage asks for the values that belong
            # to its own.
            args = pipeline.stash_and_restore_activations(call1, backward1.grad_graph_info)
            (dx,) = backward1.bind(mean1).call(dy, args=args)
            dx = dx.copy_to_ipu(0)
        with pipeline.stage(3), popxl.ipu(0):
            args = pipeline.stash_and_restore_activations(call0, backward0.grad_graph_info)
            backward0.bind(mean0).call(dx, args=args)

    for weights, mean in ((weights0, mean0), (weights1, mean1)):
        for name, weight in weights.to_dict().items():
            ops.scaled_add_(weight, mean.accum[name], b=-1.0)
        ops.var_updates.accumulator_zero_(mean.mean_accum_counter)

# The label is the largest of the first features.
features = (
    np.random.default_rng(0).normal(size=(MICRO_BATCHES, MICRO_BATCH, WIDTH)).astype(np.float32)
)
labels = features[..., :CLASSES].argmax(-1).astype(np.int32)
with popxl.Session(ir) as session:
    for step in range(61):
        losses = session.run({x_stream: features, label_stream: labels})[loss_stream]
        if step % 20 == 0:
            print(f"step {step:2}: mean loss {losses.mean():.3f}, of each micro-batch", end=" ")
            print(" ".join(f"{loss:.2f}" for loss in losses))
