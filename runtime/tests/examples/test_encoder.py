"""A BERT-style encoder written against the API: outputs and gradients are those of
torch.nn.TransformerEncoder.
"""

import math

import numpy as np
import popxl
import pytest
import torch
from helpers.addons_programs import run_program
from popxl import ops

BATCH, SEQUENCE, HIDDEN, FEED_FORWARD, HEADS, LAYERS, EPSILON = 3, 5, 12, 20, 3, 2, 1e-5
PADDED = np.array([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 1]], bool)
"""Positions that no other looks at."""


def torch_encoder(norm_first: bool) -> torch.nn.TransformerEncoder:
    """The model, every parameter random: fresh gains of one would hide that they are not
    multiplied.
    """
    layer = torch.nn.TransformerEncoderLayer(
        HIDDEN, HEADS, FEED_FORWARD, dropout=0.0, activation="gelu", layer_norm_eps=EPSILON, batch_first=True,
        norm_first=norm_first,
    )  # fmt: skip
    norm = torch.nn.LayerNorm(HIDDEN, eps=EPSILON) if norm_first else None
    model = torch.nn.TransformerEncoder(layer, LAYERS, norm, enable_nested_tensor=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return model


def linear(x: popxl.Tensor, weights: dict, name: str) -> popxl.Tensor:
    return x @ weights[f"{name}weight"].T + weights[f"{name}bias"]


def norm(x: popxl.Tensor, weights: dict, name: str) -> popxl.Tensor:
    return ops.layer_norm(x, weights[f"{name}.weight"], weights[f"{name}.bias"], EPSILON)


def attention(x: popxl.Tensor, mask: popxl.Tensor, weights: dict) -> popxl.Tensor:
    query, key, value = (
        t.reshape((BATCH, SEQUENCE, HEADS, HIDDEN // HEADS)).transpose((0, 2, 1, 3))
        for t in ops.split(linear(x, weights, "self_attn.in_proj_"), 3, axis=1)
    )
    scores = query @ key.transpose((0, 1, 3, 2)) * (1 / math.sqrt(HIDDEN // HEADS)) + mask
    mixed = ops.softmax(scores, axis=-1) @ value
    return linear(mixed.transpose((0, 2, 1, 3)).reshape(x.shape), weights, "self_attn.out_proj.")


def feed_forward(x: popxl.Tensor, weights: dict) -> popxl.Tensor:
    return linear(ops.geluerf(linear(x, weights, "linear1.")), weights, "linear2.")


def encoder(x: popxl.Tensor, weights: dict, norm_first: bool) -> popxl.Tensor:
    """[BATCH * SEQUENCE, HIDDEN] -> the same."""
    mask = popxl.constant(np.where(PADDED, -1e9, 0)[:, None, None, :], popxl.float32)
    for i in range(LAYERS):
        prefix = f"layers.{i}."
        layer = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        if norm_first:
            x = x + attention(norm(x, layer, "norm1"), mask, layer)
            x = x + feed_forward(norm(x, layer, "norm2"), layer)
        else:
            x = norm(x + attention(x, mask, layer), layer, "norm1")
            x = norm(x + feed_forward(x, layer), layer, "norm2")
    return norm(x, weights, "norm") if norm_first else x


@pytest.mark.parametrize("norm_first", [False, True], ids=["norm last", "norm first"])
def test_an_encoder_has_torchs_outputs_and_gradients(norm_first):
    model = torch_encoder(norm_first)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, SEQUENCE, HIDDEN)).astype(np.float32)
    # nobody reads what stands at padding
    dy = rng.normal(size=x.shape).astype(np.float32) * ~PADDED[..., None]
    tx = torch.tensor(x, requires_grad=True)
    expected = model(tx, src_key_padding_mask=torch.tensor(PADDED))
    expected.backward(torch.tensor(dy))
    names = [name for name, _ in model.named_parameters()]
    rows = (BATCH * SEQUENCE, HIDDEN)

    def build(ir):
        inputs = [
            popxl.variable(x.reshape(rows)),
            *(popxl.variable(p.detach().numpy()) for p in model.parameters()),
        ]

        def fn(x, *weights):
            return encoder(x, dict(zip(names, weights)), norm_first)

        graph = ir.create_graph(fn, *inputs)
        gradient = popxl.transforms.autodiff(graph)
        call = ops.call_with_info(graph, *inputs)
        given = popxl.constant(dy.reshape(rows))
        return [
            call.outputs[0],
            *ops.call(gradient.graph, given, inputs_dict=gradient.inputs_dict(call)),
        ]

    y, *gradients = run_program(build)
    kept = ~PADDED.flatten()
    np.testing.assert_allclose(
        y[kept], expected.detach().numpy().reshape(rows)[kept], rtol=1e-5, atol=1e-5
    )
    wanted = {"x": tx.grad.reshape(rows), **{name: p.grad for name, p in model.named_parameters()}}
    for (name, of), got in zip(wanted.items(), gradients, strict=True):
        error = np.linalg.norm(got - of.numpy()) / np.linalg.norm(of.numpy())
        assert error < 1e-5, f"gradient of {name}: relative error {error:.1e}"
