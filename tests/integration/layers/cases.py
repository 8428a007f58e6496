"""The layers, and for each the same computation in PyTorch, written from the formula.

An oracle takes the layer's whole parameters by name and the inputs, float64 tensors but for ids.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from popxl_gpt.config.schema import Model
from popxl_gpt.modelling.attention import Attention
from popxl_gpt.modelling.decoder import DecoderBlock
from popxl_gpt.modelling.embedding import Embedding
from popxl_gpt.modelling.feed_forward import FeedForward
from popxl_gpt.modelling.head import LogitsHead, LossHead
from popxl_gpt.modelling.layer import Layer
from popxl_gpt.modelling.norm import Norm

Weights = "dict[str, Tensor]"

# B micro-batch, S sequence, H hidden size, h heads, V vocabulary.


def bias(w: Weights, name: str) -> "Tensor | float":
    return w.get(name, 0.0)


def rms_norm(model: Model, w: Weights, x: Tensor, prefix: str) -> Tensor:
    squares = (x**2).mean(-1, keepdim=True)
    gain = w[f"{prefix}weight"] + (1 if model.zero_centered_gains else 0)
    return x / torch.sqrt(squares + model.layer_norm_eps) * gain


def norm(model: Model, w: Weights, x: Tensor, prefix: str = "") -> Tensor:
    if model.norm == "rms_norm":
        return rms_norm(model, w, x, prefix)
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    normalised = (x - mean) / torch.sqrt(variance + model.layer_norm_eps)
    return normalised * w[f"{prefix}weight"] + bias(w, f"{prefix}bias")


def turned(model: Model, t: Tensor) -> Tensor:
    """Features of a head at each position, as complex numbers times e^(i * angle): [S, D]. Those
    that do not turn stand at the end.
    """
    half = math.floor(model.rotary_fraction * model.head_width / 2)
    speeds = model.rotary_base ** (-torch.arange(half, dtype=torch.float64) / half)
    slower = model.rotary_factor if model.rotary_scaling == "linear" else 1.0
    angles = torch.arange(t.shape[0], dtype=torch.float64)[:, None] * speeds / slower
    pairs = torch.complex(t[:, :half], t[:, half : 2 * half])
    found = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([found.real, found.imag, t[:, 2 * half :]], dim=1)


def of_head(model: Model, w: Weights, t: Tensor, name: str) -> Tensor:
    """Queries or keys of a head, as they are compared: [S, D]."""
    if model.qk_norm and model.qk_norm_over == "head":
        t = rms_norm(model, w, t, f"{name}_norm.")
    is_turned = model.position_embedding == "rotary" and model.layer_pattern != ("nope",)
    return turned(model, t) if is_turned else t


def attention(
    model: Model,
    w: Weights,
    x: Tensor,
    prefix: str = "",
    keep: "Tensor | None" = None,
    words: "Tensor | None" = None,
) -> Tensor:
    # keep: factor of each probability, [B, h, S, S]
    sequence, heads, size = model.sequence_length, model.heads, model.head_width
    shared = heads // model.key_value
    projected = x @ w[f"{prefix}qkv.weight"] + bias(w, f"{prefix}qkv.bias")  # [B*S, (h+2k)*D]
    projected = convolved(model, w, projected, f"{prefix}convolution.")
    if words is not None:
        mix, width = w[f"{prefix}value_embedding.mix"], model.key_value * size
        others, values = projected[:, :-width], projected[:, -width:]
        values = mix[0] * values + mix[1] * w[f"{prefix}value_embedding.weight"][words]
        projected = torch.cat([others, values], dim=1)
    if model.qk_norm and model.qk_norm_over == "all":
        width = model.key_value * size
        queries, keys, values = projected.split([heads * size, width, width], dim=1)
        queries = rms_norm(model, w, queries, f"{prefix}query_norm.")
        keys = rms_norm(model, w, keys, f"{prefix}key_norm.")
        projected = torch.cat([queries, keys, values], dim=1)
    rows = []
    for number, block in enumerate(projected.split(sequence)):  # one sequence of the micro-batch
        found = block.split(size, dim=1)
        queries, others = found[:heads], found[heads:]
        keys, values = others[: len(others) // 2], others[len(others) // 2 :]
        results = []
        for head in range(heads):
            query = of_head(model, w, queries[head], f"{prefix}query")
            key = of_head(model, w, keys[head // shared], f"{prefix}key")
            scores = query @ key.T * (model.attention_scale or 1 / math.sqrt(size))
            if model.score_softcap:
                scores = model.score_softcap * torch.tanh(scores / model.score_softcap)
            before = torch.arange(sequence)[:, None] - torch.arange(sequence)
            is_sliding = model.layer_pattern == ("sliding",)
            hidden = (before < 0) | (before >= (model.window if is_sliding else sequence))
            shares = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=1)
            if keep is not None:
                shares = shares * keep[number, head]
            results.append(shares @ values[head // shared])
        rows.append(torch.cat(results, dim=1))
    return torch.cat(rows) @ w[f"{prefix}output.weight"] + bias(w, f"{prefix}output.bias")


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def feed_forward(model: Model, w: Weights, x: Tensor, prefix: str = "") -> Tensor:
    y = x @ w[f"{prefix}up.weight"] + bias(w, f"{prefix}up.bias")
    gate, values = y[:, : model.feed_forward], y[:, model.feed_forward :]
    if model.activation == "swiglu":
        y = gate / (1 + torch.exp(-gate)) * values
    elif model.activation == "geglu":
        y = gelu(gate) * values
    elif model.activation == "gelu_exact":
        y = 0.5 * y * (1 + torch.erf(y / math.sqrt(2)))
    else:
        y = torch.where(y > 0, y**2, 0.0) if model.activation == "relu2" else gelu(y)
    return y @ w[f"{prefix}down.weight"] + bias(w, f"{prefix}down.bias")


def convolved(model: Model, w: Weights, x: Tensor, prefix: str) -> Tensor:
    if model.convolution_size == 1:
        return x
    positions = torch.arange(len(x))[:, None] % model.sequence_length
    before = [
        torch.where(positions < distance, 0.0, x.roll(distance, 0) * factors)
        for distance, factors in enumerate(w[f"{prefix}weight"], start=1)
    ]
    return x + sum(before)


def decoder(
    model: Model,
    w: Weights,
    x: Tensor,
    words: "Tensor | None" = None,
    keep: "Sequence[Tensor] | None" = None,
) -> Tensor:
    # keep: factors of the probabilities, [B, h, S, S], and of what each of the two branches adds,
    # [N, H]
    shares, first, second = keep or (None, 1.0, 1.0)

    def into(branch: str, x: Tensor) -> Tensor:
        y = x if model.norm_placement == "after" else norm(model, w, x, f"{branch}_norm.")
        return convolved(model, w, y, f"{branch}_convolution.")

    def out_of(branch: str, y: Tensor) -> Tensor:
        is_last = model.norm_placement == "before"
        return y if is_last else norm(model, w, y, f"{branch}_output_norm.")

    y = attention(model, w, into("attention", x), "attention.", shares, words)
    attended = x + first * out_of("attention", y)
    y = into("feed_forward", x if model.parallel_branches else attended)
    return attended + second * out_of("feed_forward", feed_forward(model, w, y, "feed_forward."))


def embedding(model: Model, w: Weights, words: Tensor) -> Tensor:
    positions = torch.arange(words.shape[0]) % model.sequence_length
    x = w["word.weight"][words] * model.embedding_scale
    if model.token_shift:
        begins = positions == 0
        x = x + torch.where(begins[:, None], 0.0, x.roll(1, 0) * w["shift.weight"])
    if model.bigram_rows:
        x = x + w["bigram.weight"][rows_of_pairs(model, words.tolist())]
    return x if model.position_embedding == "rotary" else x + w["position.weight"][positions]


def rows_of_pairs(model: Model, words: "Sequence[int]") -> "list[int]":
    """In integers of Python: 1 more than the word before, 0 at the begin of a sequence, times the
    number next to the golden ratio of the rows.
    """
    rows, step = model.bigram_rows, round(0.6180339887498949 * model.bigram_rows)
    begins = range(0, len(words), model.sequence_length)
    before = [0 if n in begins else word + 1 for n, word in enumerate([0, *words[:-1]])]
    return [(word + each * step) % rows for word, each in zip(words, before)]


def loss(model: Model, w: Weights, x: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits(model, w, x, torch.arange(len(x))), labels)


class LossesHead(LossHead):
    """The head with a second loss."""

    def __init__(self, model, layout):
        super().__init__(model, layout, {"cross_entropy": 1.0, "z_loss": 0.3})


def losses(model: Model, w: Weights, x: Tensor, labels: Tensor) -> Tensor:
    z = logits(model, w, x, torch.arange(len(x))).logsumexp(dim=1)
    return loss(model, w, x, labels) + 0.3 * (z * z).mean()


def logits(model: Model, w: Weights, x: Tensor, rows: Tensor) -> Tensor:
    matrix = w["word.weight" if model.tied_head else "output.weight"]
    y, cap = norm(model, w, x[rows], "norm.") @ matrix.T, model.logit_softcap
    return cap * torch.tanh(y / cap) if cap else y


@dataclass(frozen=True)
class Case:
    """A layer, its inputs, its oracle."""

    layer: "type[Layer]"
    oracle: Callable[..., Tensor]
    inputs: "tuple[str, ...]"
    """Kinds of inputs: x, words, labels or rows."""
    output: str = "hidden"
    """What the result's last axis is: hidden, vocabulary, or nothing."""


CASES = {
    "norm": Case(Norm, norm, ("x",)),
    "attention": Case(Attention, attention, ("x",)),
    "feed_forward": Case(FeedForward, feed_forward, ("x",)),
    "decoder": Case(DecoderBlock, decoder, ("x",)),
    "embedding": Case(Embedding, embedding, ("words",)),
    "loss": Case(LossHead, loss, ("x", "labels"), output="nothing"),
    "losses": Case(LossesHead, losses, ("x", "labels"), output="nothing"),
    "logits": Case(LogitsHead, logits, ("x", "rows"), output="vocabulary"),
}


class DecoderBlockOfWords(DecoderBlock):
    """The block with an argument less."""

    def build(self, x, words):
        return super().build(x, words=words)


CHOICES = {
    "no biases, relu2": {"biases": False, "activation": "relu2"},
    "rms_norm, swiglu": {"norm": "rms_norm", "activation": "swiglu"},
    "rotary, qk_norm": {"position_embedding": "rotary", "rotary_base": 50.0, "qk_norm": True},
    "grouped queries": {"key_value_heads": 2, "qk_norm": True},
    "bounded scores": {"attention_scale": 0.6, "score_softcap": 0.8},
    "heads of a size of their own": {"head_size": 10, "key_value_heads": 2, "qk_norm": True},
    "biases of queries, keys and values alone": {"biases": False, "qkv_biases": True},
    "biases of all but queries, keys and values": {"qkv_biases": False},
    "value embeddings": {"value_embeddings": True, "key_value_heads": 2, "head_size": 10},
    "token shift": {"token_shift": True},
    "pairs of words": {"bigram_rows": 31},
    "short convolutions": {"convolution_size": 3},
    "untied head, softcap": {"tied_head": False, "logit_softcap": 1.5},
    "exact GELU, norms after, of all heads": {
        "norm_placement": "after",
        "activation": "gelu_exact",
        "key_value_heads": 2,
        "qk_norm": True,
        "qk_norm_over": "all",
    },
    "GEGLU, norms around, gains from one": {
        "norm": "rms_norm",
        "norm_placement": "around",
        "zero_centered_gains": True,
        "activation": "geglu",
        "key_value_heads": 2,
        "qk_norm": True,
    },
    "gains of all heads from one": {
        "norm": "rms_norm",
        "zero_centered_gains": True,
        "qk_norm": True,
        "qk_norm_over": "all",
    },
    "branches of one input, heads that turn in part": {
        "parallel_branches": True,
        "position_embedding": "rotary",
        "rotary_base": 50.0,
        "head_size": 10,
        "rotary_fraction": 0.45,
    },
    "scaled embedding": {"embedding_scale": 4.9, "token_shift": True, "bigram_rows": 50},
}
"""Settings of a model beside GPT-2's."""
BLOCK = {"decoder": CASES["decoder"]}
CHANGED = {
    **dict.fromkeys(CHOICES, BLOCK),
    "value embeddings": {"decoder": Case(DecoderBlockOfWords, decoder, ("x", "words"))},
    **dict.fromkeys(
        ("token shift", "pairs of words", "scaled embedding"), {"embedding": CASES["embedding"]}
    ),
    "untied head, softcap": {name: CASES[name] for name in ("loss", "logits")},
}
"""Layers that a choice changes."""
SPLITS = [(1, 1), (2, 1), (1, 2), (2, 4), (4, 2), (4, 4)]
"""(tp1, tp2)."""
