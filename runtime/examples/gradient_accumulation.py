"""Gradient accumulation: eight small batches, one update. The update is that of the one large
batch.

A least-squares line through noisy points; the script draws the points.
"""

import numpy as np
import popxl
import popxl_addons as addons
from popxl import ops

MICRO_BATCHES, MICRO_BATCH, LEARNING_RATE = 8, 4, 0.5


class Line(addons.Module):
    """Mean squared distance of y from slope * x + offset, over a micro-batch."""

    def build(self, x: popxl.Tensor, y: popxl.Tensor) -> popxl.Tensor:
        """Add the model and its loss to the current graph."""
        slope = self.add_variable_input("slope", lambda: np.zeros(()), popxl.float32)
        offset = self.add_variable_input("offset", lambda: np.zeros(()), popxl.float32)
        distance = x * slope + offset - y
        return ops.mean(distance * distance)


class MicroBatch(addons.Module):
    """Forward and backward on the next element of the streams; its variables are the line's and the
    accumulators.
    """

    def build(self) -> None:
        """Add one step of the loop to the current graph."""
        line = self.add_variable_inputs("line", line_facts)
        # by reference: what a call writes stays written
        mean = self.add_variable_inputs("mean", mean_facts)
        call = forward.bind(line).call_with_info(ops.host_load(x_stream), ops.host_load(y_stream))
        ops.host_store(loss_stream, call.outputs[0])
        one = popxl.constant(1.0, popxl.float32)
        backward.bind(mean).call(one, args=backward.grad_graph_info.inputs_dict(call))


ir = popxl.Ir()
ir.num_host_transfers = MICRO_BATCHES  # each run takes so many elements of every stream
with ir.main_graph, popxl.in_sequence():
    x_stream = popxl.h2d_stream((MICRO_BATCH,), popxl.float32, name="x")
    y_stream = popxl.h2d_stream((MICRO_BATCH,), popxl.float32, name="y")
    loss_stream = popxl.d2h_stream((), popxl.float32, name="loss")

    line_facts, forward = Line().create_graph(x_stream.spec, y_stream.spec)
    # The gradients of these tensors are no outputs: each call adds them to the mean in an
    # accumulator.
    mean_facts, backward = addons.autodiff_with_accumulation(
        forward, forward.args.tensors, grads_required=[]
    )

    facts, loop = MicroBatch().create_graph()
    state = facts.init()
    ops.repeat(loop.graph, MICRO_BATCHES, inputs_dict=loop.args.to_mapping(state))

    for name, variable in state.line.to_dict().items():
        ops.scaled_add_(variable, state.mean.accum[name], b=-LEARNING_RATE)
    ops.var_updates.accumulator_zero_(state.mean.mean_accum_counter)  # the next mean starts afresh

rng = np.random.default_rng(0)
x = rng.uniform(-1, 1, (MICRO_BATCHES, MICRO_BATCH)).astype(np.float32)
y = (3 * x - 1 + rng.normal(0, 0.1, x.shape)).astype(np.float32)

slope, offset = 0.0, 0.0  # the same by hand, on all points at once
with popxl.Session(ir) as session:
    for step in range(6):
        losses = session.run({x_stream: x, y_stream: y})[loss_stream]
        distance = slope * x + offset - y
        slope -= LEARNING_RATE * (2 * distance * x).mean()
        offset -= LEARNING_RATE * (2 * distance).mean()
        ours = [float(session.get_tensor_data(v)) for v in (state.line.slope, state.line.offset)]
        print(
            f"step {step}: loss {losses.mean():.4f}  line {ours[0]:.3f} * x {ours[1]:+.3f}",
            end="  ",
        )
        print(f"in one batch {slope:.3f} * x {offset:+.3f}")
