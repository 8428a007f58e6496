"""Layers for images against torch's: outputs, gradients, and a small network in training."""

import numpy as np
import popxl
import popxl_addons as addons
import pytest
import torch
from helpers.addons_programs import normal, run_program
from popxl import ops
from popxl_addons.layers import Conv2D, GroupNorm, Linear
from popxl_addons.testing_utils import TensorInput, run_module

STEPS, BATCH, CLASSES, LEARNING_RATE = 12, 4, 3, 0.5


def randomised(layer):
    """A torch layer whose parameters are all random: fresh biases and gains hide mistakes."""
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(torch.tensor(normal(*parameter.shape, seed=i)))
    return layer


def assert_like_torch(layer, reference, x):
    """Output, and gradients of input and variables, are those of a torch layer whose weights are
    mapped.
    """
    tx = torch.tensor(x, requires_grad=True)
    y = randomised(reference)(tx)
    dy = normal(*y.shape, seed=7)
    y.backward(torch.tensor(dy))

    def build(ir):
        t = popxl.variable(x)
        facts, graph = layer.create_graph(t)
        variables = facts.init()
        for variable, value in layer.torch_mapping(variables, reference).items():
            variable.host_value[...] = value
        grad = addons.autodiff(graph, grads_required=graph.graph.inputs)
        call = graph.bind(variables).call_with_info(t)
        return [
            call.outputs[0],
            *grad.call(popxl.variable(dy), args=grad.grad_graph_info.inputs_dict(call)),
        ]

    wanted = [y.detach(), tx.grad, *(p.grad for p in reference.parameters())]
    for got, expected in zip(run_program(build), wanted, strict=True):
        np.testing.assert_allclose(got, expected.numpy(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "ours, torchs",
    [
        ({"out_channels": 4, "kernel_size": 3}, {"kernel_size": 3}),
        (
            {"out_channels": 4, "kernel_size": (2, 3), "bias": False},
            {"kernel_size": (2, 3), "bias": False},
        ),
        (
            {
                "out_channels": 4,
                "kernel_size": 3,
                "strides": (2, 1),
                "paddings": (1, 2, 1, 2),
                "dilations": (1, 2),
            },
            {"kernel_size": 3, "stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)},
        ),
        ({"out_channels": 6, "kernel_size": 3, "groups": 2}, {"kernel_size": 3, "groups": 2}),
        (
            {"out_channels": 4, "kernel_size": (3, 1), "paddings": "same_upper"},
            {"kernel_size": (3, 1), "padding": "same"},
        ),
        (
            {"out_channels": 4, "kernel_size": 2, "paddings": "valid"},
            {"kernel_size": 2, "padding": "valid"},
        ),
    ],
    ids=["plain", "no bias", "strided", "groups", "same", "valid"],
)
def test_conv2d_gives_torchs_outputs_and_gradients(ours, torchs):
    reference = torch.nn.Conv2d(4, ours["out_channels"], **torchs)
    assert_like_torch(Conv2D(**ours), reference, normal(2, 4, 6, 5))


@pytest.mark.parametrize("shape", [(3, 6), (2, 6, 4), (2, 6, 3, 2)], ids=len)
def test_group_norm_gives_torchs_outputs_and_gradients(shape):
    assert_like_torch(GroupNorm(3, eps=1e-3), torch.nn.GroupNorm(3, 6, eps=1e-3), normal(*shape))


def test_fresh_layers_start_from_small_weights_zero_biases_and_unit_gains():
    with popxl.Ir().main_graph:
        image = popxl.TensorSpec((1, 4, 3, 3), popxl.float16)
        conv, _ = Conv2D(6, 2, groups=2).create_graph(image)
        norm, _ = GroupNorm(2).create_graph(image)
        conv, norm = conv.init(), norm.init()
        weight = conv.weight
        assert weight.shape == (6, 2, 2, 2) and weight.dtype is popxl.float16
        assert 0 < np.abs(weight.host_value).max() <= 0.0401
        assert not conv.bias.host_value.any() and not norm.bias.host_value.any()
        assert (norm.weight.host_value == 1).all()


def test_replicas_of_a_grouping_have_variables_of_their_own():
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        each = ir.replica_grouping(group_size=1)
        image = popxl.TensorSpec((1, 4, 3, 3), popxl.float32)
        for layer in (Conv2D(2, 2, replica_grouping=each), GroupNorm(2, replica_grouping=each)):
            variables = layer.create_graph(image)[0].init()
            assert all(
                t.replica_grouping == each and t.shape_on_host[0] == 2 for t in variables.tensors
            )


def test_a_group_norm_that_caches_makes_one_graph_for_equal_inputs():
    with popxl.Ir().main_graph:
        layer, image = GroupNorm(2, cache=True), popxl.TensorSpec((1, 4, 3, 3), popxl.float32)
        assert layer.create_graph(image)[1].graph is layer.create_graph(image)[1].graph


def test_layers_refuse_other_ranks_in_their_own_words():
    with popxl.Ir().main_graph:
        flat = popxl.TensorSpec((4,), popxl.float32)
        with pytest.raises(ValueError, match=r"Conv2D: got x .* expected four axes"):
            Conv2D(2, 2).create_graph(popxl.TensorSpec((2, 4, 4), popxl.float32))
        with pytest.raises(ValueError, match=r"GroupNorm: got x .* expected two axes or more"):
            GroupNorm(2).create_graph(flat)


def test_conv2d_passes_names_of_paddings_on_and_refuses_unknown_ones():
    x = normal(1, 2, 5, 5)
    (y,) = run_module(Conv2D(3, 3, strides=(2, 2), paddings="same_lower"), TensorInput(x))
    assert y.shape == (1, 3, 3, 3)
    with pytest.raises(ValueError, match="got pad_type = 'reflect'"):
        run_module(Conv2D(3, 3, paddings="reflect"), TensorInput(x))


class Network(addons.Module):
    """Convolution, group norm, relu, max pool; once more with a stride; average pool; classes.
    Returns the loss.
    """

    def __init__(self):
        super().__init__()
        self.first = Conv2D(8, 3, paddings="same_upper")
        self.norm = GroupNorm(2)
        self.second = Conv2D(8, 3, strides=(2, 2), paddings=(1, 1, 1, 1), groups=4)
        self.head = Linear(CLASSES)

    def build(self, images: popxl.Tensor, labels: popxl.Tensor) -> popxl.Tensor:
        x = ops.relu(self.norm(self.first(images)))
        x = ops.max_pool(x, (2, 2), stride=(2, 2))
        x = ops.relu(self.second(x))
        x = ops.average_pool(x, x.shape[2:])
        logits = self.head(ops.reshape(x, (BATCH, -1)))
        return ops.nll_loss(ops.softmax(logits, -1), labels)


class TorchNetwork(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(2, 8, 3, padding="same")
        self.norm = torch.nn.GroupNorm(2, 8)
        self.second = torch.nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=4)
        self.head = torch.nn.Linear(8, CLASSES)

    def forward(self, images, labels):
        x = torch.nn.functional.max_pool2d(torch.relu(self.norm(self.first(images))), 2)
        x = torch.relu(self.second(x)).mean((2, 3))
        return torch.nn.functional.cross_entropy(self.head(x), labels)


def torch_training(network, images, labels):
    optimizer = torch.optim.SGD(network.parameters(), LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = network(torch.tensor(images[step]), torch.tensor(labels[step]).long())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_a_small_network_trains_as_torchs_does():
    images, labels = (
        normal(STEPS, BATCH, 2, 8, 6),
        np.arange(STEPS * BATCH).reshape(STEPS, BATCH) % CLASSES,
    )
    images += labels[:, :, None, None, None] - 1  # something to learn
    torch.manual_seed(0)
    reference = TorchNetwork()
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        streams = [
            popxl.h2d_stream(images.shape[1:], popxl.float32),
            popxl.h2d_stream(labels.shape[1:], popxl.int32),
        ]
        losses = popxl.d2h_stream((), popxl.float32)
        inputs = [ops.host_load(stream) for stream in streams]
        facts, graph = Network().create_graph(*inputs)
        variables = facts.init()
        for name in ("first", "norm", "second", "head"):
            layer = {"head": Linear, "norm": GroupNorm}.get(name, Conv2D)
            mapping = layer.torch_mapping(getattr(variables, name), getattr(reference, name))
            for variable, value in mapping.items():
                variable.host_value[...] = value
        grad = addons.autodiff(graph, grads_required=graph.args.tensors)
        call = graph.bind(variables).call_with_info(*inputs)
        ops.host_store(losses, call.outputs[0])
        gradients = grad.call(popxl.constant(1.0), args=grad.grad_graph_info.inputs_dict(call))
        for variable, gradient in zip(variables.tensors, gradients, strict=True):
            ops.scaled_add_(variable, gradient, b=-LEARNING_RATE)

    with popxl.Session(ir) as session:
        ours = [
            float(session.run(dict(zip(streams, step)))[losses])
            for step in zip(images, labels.astype(np.int32))
        ]
    np.testing.assert_allclose(ours, torch_training(reference, images, labels), rtol=2e-5)
    assert ours[-1] < 0.8 * ours[0]
    for name in ("first", "second"):
        for variable, value in Conv2D.torch_mapping(
            getattr(variables, name), getattr(reference, name)
        ).items():
            np.testing.assert_allclose(
                session.get_tensor_data(variable), value, rtol=1e-4, atol=1e-5
            )
