"""Data-parallel training: four replicas learn to read digits, each from images of its own, with one
set of weights.

The digits are made here: 3 x 5 points, somewhere on a grey and noisy image. Every replica computes
the gradient of its images; the mean of the four moves the weights, so that all stay the same.
Dropout is different on each. The replicas
are in one process, or in several: `poprun --num-replicas 4 --num-instances 2 python
mnist_data_parallel.py`.

B images per replica.
"""

from dataclasses import dataclass

import numpy as np
import popdist
import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import InputStreams, NamedTensors, OutputStreams
from popxl_addons.layers import Conv2D, GroupNorm, Linear
from popxl_addons.optimizers import AdamOptimizerStep

DIGITS = "75557 22222 71747 71717 55711 74717 74757 71111 75757 75717"
FONT = {"7": "111", "5": "101", "4": "100", "2": "010", "1": "001"}
SIZE = 14


@dataclass(frozen=True)
class MnistConfig:
    """The model, and how it is trained."""

    replicas: int = 4
    micro_batch_size: int = 16
    channels: int = 4
    hidden_size: int = 32
    dropout: float = 0.1
    learning_rate: float = 1e-2
    dtype: popxl.dtype = popxl.float32


class Net(addons.Module):
    """Two convolutions, normalised and pooled, and two linear layers."""

    def __init__(self, config: MnistConfig):
        super().__init__()
        self.config = config
        self.conv1, self.norm1 = Conv2D(config.channels, 3, paddings=(1, 1, 1, 1)), GroupNorm(2)
        self.conv2, self.norm2 = Conv2D(2 * config.channels, 3, paddings=(1, 1, 1, 1)), GroupNorm(2)
        self.linear1, self.linear2 = Linear(config.hidden_size), Linear(10)

    def build(
        self, images: popxl.Tensor, seed: popxl.Tensor, is_training: bool = True
    ) -> popxl.Tensor:
        """images [B, 1, SIZE, SIZE], seed [2] -> scores [B, 10]."""
        x = ops.max_pool(ops.relu(self.norm1(self.conv1(images))), (2, 2), (2, 2))
        x = ops.max_pool(ops.relu(self.norm2(self.conv2(x))), (2, 2), (2, 2))
        x = ops.relu(self.linear1(x.reshape((images.shape[0], -1))))
        if is_training and self.config.dropout > 0:
            x = ops.dropout(x, seed, p=self.config.dropout)
        return self.linear2(x)


def training_session(config: MnistConfig) -> addons.TaskSession:
    """A session that does one step of AdamW with each run."""
    ir = popxl.Ir(replication="popdist" if popdist.isPopdistEnvSet() else config.replicas)
    with ir.main_graph, popxl.in_sequence():
        inputs = InputStreams(
            images=((config.micro_batch_size, 1, SIZE, SIZE), config.dtype),
            labels=((config.micro_batch_size,), popxl.int32),
        )
        outputs = OutputStreams(loss=((), config.dtype))
        images, labels = (ops.host_load(stream) for stream in inputs)
        seed_of_host, seed = addons.seed_variable(0)  # another one on every replica

        facts, forward = Net(config).create_graph(images, seed)
        variables = NamedTensors(fwd=facts.init(), seed=seed_of_host)
        gradient = addons.autodiff(forward, grads_required=forward.args.tensors)
        call = forward.bind(variables.fwd).call_with_info(images, seed)
        loss, scores_gradient = addons.cross_entropy_with_grad(call.outputs[0], labels)
        ops.host_store(outputs.loss, ops.collectives.replicated_all_reduce(loss, op="mean"))
        gradients = gradient.call(scores_gradient, args=gradient.grad_graph_info.inputs_dict(call))

        names = {t: name for name, t in forward.args.to_dict().items()}
        for t, weight_gradient in zip(forward.args.tensors, gradients):
            weight = variables.fwd[names[t]]
            mean = ops.collectives.replicated_all_reduce_(weight_gradient, op="mean")
            optim_facts, update = AdamOptimizerStep().create_graph(
                weight,
                mean,
                lr=config.learning_rate,
                weight_decay=0.0,
                first_order_dtype=popxl.float32,
            )
            state = optim_facts.init()
            variables.insert(f"optim.{names[t]}", state, overwrite=True)
            update.bind(state).call(weight, mean)
        seed += 1
    return addons.TaskSession(inputs, outputs, variables, ir=ir, device_desc="cpu")


def test_session(config: MnistConfig, images: int) -> addons.TaskSession:
    """A session of one replica that says which digits it sees."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        inputs = InputStreams(images=((images, 1, SIZE, SIZE), config.dtype))
        outputs = OutputStreams(digits=((images,), popxl.int32))
        x, seed = ops.host_load(inputs.images), popxl.constant([0, 0], popxl.uint32)
        facts, graph = Net(config).create_graph(x, seed, is_training=False)
        variables = NamedTensors(fwd=facts.init())
        (scores,) = graph.bind(variables.fwd).call(x, seed)
        ops.host_store(outputs.digits, ops.argmax(scores, dim=1))
    return addons.TaskSession(inputs, outputs, variables, ir=ir, device_desc="cpu")


def digits(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Images [*shape, 1, SIZE, SIZE] float32, and which digits they show: [*shape] int32."""
    labels = rng.integers(0, 10, shape).astype(np.int32)
    images = rng.normal(0, 0.2, (*shape, 1, SIZE, SIZE)).astype(np.float32)
    for place in np.ndindex(shape):
        rows = DIGITS.split()[labels[place]]
        points = np.array([[int(point) for point in FONT[row]] for row in rows])
        y, x = rng.integers(0, 4, 2) + (0, 2)
        images[place][0, y : y + 10, x : x + 6] += np.kron(points, np.ones((2, 2)))
    return images, labels


def train(session: addons.TaskSession, images: np.ndarray, labels: np.ndarray) -> float:
    """One step on images [replicas, B, 1, SIZE, SIZE], those of all processes: the mean loss of all
    replicas.
    """
    here = session.ir.instance_replication_factor
    first = popdist.getInstanceIndex() * here
    fed = {session.inputs.images: images, session.inputs.labels: labels}
    # no axis for a single replica
    shapes = {stream: session._full_input_shape(stream.shape) for stream in fed}
    outputs = session.run(
        {stream: data[first : first + here].reshape(shapes[stream]) for stream, data in fed.items()}
    )
    return float(np.mean(outputs[session.outputs.loss]))


def main() -> None:
    """Train on four replicas, test on one."""
    np.random.seed(0)
    rng, config = np.random.default_rng(0), MnistConfig()
    say = print if popdist.getInstanceIndex() == 0 else lambda text: None
    with training_session(config) as training:
        for step in range(101):
            loss = train(training, *digits(rng, config.replicas, config.micro_batch_size))
            if step % 25 == 0:
                say(f"step {step:3}: loss {loss:.1f}")
    images, labels = digits(rng, 500)
    with test_session(config, len(images)) as testing:
        testing.load_from_session(training)
        said = testing.run({testing.inputs.images: images})[testing.outputs.digits]
    say(
        f"right on {(said == labels).mean():.0%} of {len(images)} images that were not shown before"
    )


if __name__ == "__main__":
    main()
