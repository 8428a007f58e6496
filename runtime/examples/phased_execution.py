"""Phased execution: a perceptron for images of 28 x 28, of which one layer at a time is on the
device.

Weights and activations rest in remote buffers. A phase fetches one layer, takes every micro-batch
through it, and stores what comes out. The data are made here: ten random patterns, and images
that are noisy copies of them.
"""

import numpy as np
import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import NamedTensors, RemoteHandle
from popxl_addons.layers import Linear

PIXELS, HIDDEN, CLASSES = 28 * 28, 64, 10
MICRO_BATCHES, MICRO_BATCH, LEARNING_RATE = 4, 16, 0.05


class Hidden(addons.Module):
    """relu(x @ weight + bias), [MICRO_BATCH, PIXELS] -> [MICRO_BATCH, HIDDEN]."""

    def __init__(self):
        super().__init__()
        self.linear = Linear(HIDDEN)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """Add the layer to the current graph."""
        return ops.relu(self.linear(x))


class Head(addons.Module):
    """The last layer with the loss, forward and backward in one phase."""

    def build(self, x: popxl.Tensor, label: popxl.Tensor):
        """x [MICRO_BATCH, HIDDEN], label [MICRO_BATCH] -> mean loss [], its gradient by x."""
        facts, forward = Linear(CLASSES).create_graph(x)
        mean_facts, backward = with_gradient(forward, forward.graph.inputs[:1])
        call = forward.bind(self.add_variable_inputs("linear", facts)).call_with_info(x)
        loss, dy = addons.cross_entropy_with_grad(call.outputs[0], label)
        mean = self.add_variable_inputs("mean", mean_facts)
        return loss, *backward.bind(mean).call(dy, args=backward.grad_graph_info.inputs_dict(call))


def with_gradient(forward: addons.GraphWithNamedArgs, wanted):
    """The gradient graph: the gradients of all variables go to accumulators, those of `wanted` come
    out.
    """
    return addons.autodiff_with_accumulation(forward, forward.args.tensors, grads_required=wanted)


def fetch(buffers) -> NamedTensors:
    """A layer's variables, copied to the device."""
    load, names = addons.load_remote_graph(buffers)
    return NamedTensors.pack(names, load.call(0))


def update(buffers, variables: NamedTensors, gradients: NamedTensors) -> None:
    """One step of gradient descent, stored."""
    for name, variable in variables.to_dict().items():
        ops.scaled_add_(variable, gradients[name], b=-LEARNING_RATE)
    addons.store_remote_graph(buffers).bind(variables).call(0)


np.random.seed(0)
ir = popxl.Ir()
ir.num_host_transfers = MICRO_BATCHES
with ir.main_graph, popxl.in_sequence():
    images = popxl.h2d_stream((MICRO_BATCH, PIXELS), popxl.float32, name="images")
    labels = popxl.h2d_stream((MICRO_BATCH,), popxl.int32, name="labels")
    losses = popxl.d2h_stream((), popxl.float32, name="losses")

    # The graphs of one micro-batch, and the remote homes of their variables.
    facts, forward = Hidden().create_graph(images.spec)
    mean_facts, backward = with_gradient(forward, [])
    (x, *_), (y, *_), (dy, *_) = forward.graph.inputs, forward.graph.outputs, backward.graph.inputs
    head_facts, head = Head().create_graph(y.spec, labels.spec)
    (head_x, label, *_), (loss, head_dx) = head.graph.inputs, head.graph.outputs
    buffers, head_buffers = (addons.named_variable_buffers(f) for f in (facts, head_facts.linear))
    weights, head_weights = facts.init_remote(buffers), head_facts.linear.init_remote(head_buffers)

    # The graphs of all micro-batches: what passes between phases waits in buffers with one entry
    # for each.
    y_buffer, dy_buffer = (addons.batch_serial_buffer(y, steps=MICRO_BATCHES) for _ in range(2))
    forward_all, backward_all = addons.batch_serialise_fwd_and_grad(
        forward,
        backward,
        forward.args,
        MICRO_BATCHES,
        load_handles={x: images, dy: RemoteHandle(dy_buffer)},
        store_streams={},
        store_buffers={y: RemoteHandle(y_buffer)},
        io_mode="compute",
    )
    head_all = addons.batch_serialise(
        head,
        MICRO_BATCHES,
        load_handles={head_x: RemoteHandle(y_buffer), label: labels},
        store_streams={loss: losses},
        store_buffers={head_dx: RemoteHandle(dy_buffer)},
        io_mode="compute",
    )

    # Phase 1: the first layer, forward.
    forward_all.graph.bind(fetch(buffers)).call(0)

    # Phase 2: the head, forward and backward, and its update.
    held = NamedTensors.from_dict(
        {"linear": fetch(head_buffers), "mean": head_facts.mean.init_zero()}
    )
    head_all.graph.bind(held).call(0)
    update(head_buffers, held.linear, held.mean.accum)

    # Phase 3: the first layer, backward, and its update.
    held = fetch(buffers)
    mean = mean_facts.init_zero()
    backward_all.graph.bind(NamedTensors.from_dict({**held.to_dict(), **mean.to_dict()})).call(0)
    update(buffers, held, mean.accum)

rng = np.random.default_rng(0)
patterns = rng.normal(size=(CLASSES, PIXELS)).astype(np.float32)
with popxl.Session(ir) as session:
    for step in range(31):
        digits = rng.integers(0, CLASSES, (MICRO_BATCHES, MICRO_BATCH)).astype(np.int32)
        noise = rng.normal(size=(*digits.shape, PIXELS)).astype(np.float32)
        outputs = session.run({images: patterns[digits] + 2 * noise, labels: digits})
        if step % 10 == 0:
            print(f"step {step:2}: loss {outputs[losses].mean():.3f}")
    print(
        "weight of the first layer, fetched at the end:",
        session.get_tensor_data(weights.linear.weight).shape,
    )
