"""A LLaMA decoder written against the API: loss and gradients are those of Hugging Face's with the same weights."""

import math

import numpy as np
import popxl
import pytest
import torch
from addons_programs import run_program
from popxl import ops
from popxl_addons.ops.cross_entropy import cross_entropy
from popxl_addons.ops.rotary_pos_embed import rotary_pos_embed, trig_table_constants
from quick import Later

transformers = Later("transformers")
VOCABULARY, HIDDEN, FEED_FORWARD, LAYERS, HEADS, KV_HEADS, FEATURES = 50, 24, 40, 2, 4, 2, 6
BATCH, SEQUENCE, EPSILON = 2, 7, 1e-6


def hugging_face() -> torch.nn.Module:
    """The model, every parameter random: fresh gains of one would hide that they are not multiplied."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=FEED_FORWARD, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=FEATURES, max_position_embeddings=SEQUENCE,
        rms_norm_eps=EPSILON, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return model


def interleaved(weight: np.ndarray) -> np.ndarray:
    """Rows of a query or key projection in another order: Hugging Face pairs feature i with i + FEATURES / 2."""
    by_head = weight.reshape(-1, 2, FEATURES // 2, HIDDEN)
    return np.ascontiguousarray(by_head.swapaxes(1, 2)).reshape(weight.shape)


def as_ours(name: str, weight: torch.Tensor) -> np.ndarray:
    array = weight.detach().numpy()
    return interleaved(array) if "q_proj" in name or "k_proj" in name else array


def rms_norm(x: popxl.Tensor, gain: popxl.Tensor) -> popxl.Tensor:
    square = ops.mean(x * x, axis=-1, keepdims=True)
    return x / ops.sqrt(square + EPSILON) * gain


def attention(x: popxl.Tensor, layer: dict) -> popxl.Tensor:
    def heads(name: str, count: int) -> popxl.Tensor:
        return (x @ layer[f"self_attn.{name}_proj.weight"].T).reshape((BATCH, SEQUENCE, count, FEATURES))

    sin, cos = trig_table_constants(SEQUENCE, FEATURES)
    query = rotary_pos_embed(heads("q", HEADS), sin, cos)
    key = rotary_pos_embed(heads("k", KV_HEADS), sin, cos)
    shared = popxl.constant(np.repeat(np.arange(KV_HEADS), HEADS // KV_HEADS), popxl.int32)
    key, value = (ops.gather(t, shared, axis=2) for t in (key, heads("v", KV_HEADS)))  # [B, S, heads, features]
    query, value = (t.transpose((0, 2, 1, 3)) for t in (query, value))
    scores = query @ key.transpose((0, 2, 3, 1)) * (1 / math.sqrt(FEATURES))  # [B, heads, S, S]
    future = popxl.constant(np.triu(np.full((SEQUENCE, SEQUENCE), -1e9), 1), popxl.float32)
    mixed = ops.softmax(scores + future, axis=-1) @ value
    mixed = mixed.transpose((0, 2, 1, 3)).reshape((BATCH, SEQUENCE, HEADS * FEATURES))
    return mixed @ layer["self_attn.o_proj.weight"].T


def feed_forward(x: popxl.Tensor, layer: dict) -> popxl.Tensor:
    gate, up = (x @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return (ops.swish(gate) * up) @ layer["mlp.down_proj.weight"].T


def llama(ids: popxl.Tensor, weights: dict) -> popxl.Tensor:
    """Mean cross entropy of each token by those before it."""
    x = ops.gather(weights["model.embed_tokens.weight"], ids)  # [B, S, hidden]
    for i in range(LAYERS):
        prefix = f"model.layers.{i}."
        layer = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        x = x + attention(rms_norm(x, layer["input_layernorm.weight"]), layer)
        x = x + feed_forward(rms_norm(x, layer["post_attention_layernorm.weight"]), layer)
    logits = rms_norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T
    logits = logits[:, :-1].reshape((BATCH * (SEQUENCE - 1), VOCABULARY))
    return cross_entropy(logits, ids[:, 1:].flatten())


@pytest.mark.slow
def test_a_llama_decoder_has_hugging_faces_loss_and_gradients():
    model = hugging_face()
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, SEQUENCE)).astype(np.int32)
    expected = model(torch.tensor(ids).long(), labels=torch.tensor(ids).long()).loss
    expected.backward()
    names = [name for name, _ in model.named_parameters()]

    def build(ir):
        tokens = popxl.variable(ids)
        weights = [popxl.variable(as_ours(name, p)) for name, p in model.named_parameters()]

        def fn(tokens, *weights):
            return llama(tokens, dict(zip(names, weights)))

        graph = ir.create_graph(fn, tokens, *weights)
        gradient = popxl.transforms.autodiff(graph, grads_required=graph.inputs[1:])
        call = ops.call_with_info(graph, tokens, *weights)
        one = popxl.constant(1.0, popxl.float32)
        return [call.outputs[0], *ops.call(gradient.graph, one, inputs_dict=gradient.inputs_dict(call))]

    loss, *gradients = run_program(build)
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-6)
    for (name, parameter), got in zip(model.named_parameters(), gradients):
        wanted = as_ours(name, parameter.grad)
        error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
        assert error < 1e-5, f"gradient of {name}: relative error {error:.1e}"
