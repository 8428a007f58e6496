"""Models that are no GPT-2, and their logits and losses by formula."""

import dataclasses

import numpy as np
import torch

from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config, Model
from tests.integration.gpt_oracle import small
from tests.integration.layers import cases as formulas

EXPORTED = {
    "no biases, relu2": {
        "biases": False,
        "activation": "relu2",
        "token_shift": True,
        "bigram_rows": 23,
        "convolution_size": 3,
    },
    "rms_norm, swiglu, grouped queries": {
        "norm": "rms_norm",
        "activation": "swiglu",
        "feed_forward_size": 40,
        "key_value_heads": 2,
        "convolution_size": 2,
    },
    "rotary, qk_norm, untied head": {
        "position_embedding": "rotary",
        "rotary_base": 100.0,
        "token_shift": True,
        "bigram_rows": 50,
        "convolution_size": 4,
        "qk_norm": True,
        "value_embeddings": True,
        "attention_serialisation": 3,
        "tied_head": False,
        "logit_softcap": 3.0,
    },
    "heads of a size of their own": {
        "head_size": 10,
        "key_value_heads": 2,
        "biases": False,
        "qkv_biases": True,
        "convolution_size": 2,
        "position_embedding": "rotary",
    },
}
"""Models that go out with our code for them."""
MODELS = {
    **EXPORTED,
    "norms around, gains from one, GEGLU": {
        "norm": "rms_norm",
        "norm_placement": "around",
        "zero_centered_gains": True,
        "activation": "geglu",
        "biases": False,
        "embedding_scale": 4.9,
        "attention_scale": 0.5,
        "score_softcap": 1.5,
        "head_size": 10,
        "key_value_heads": 2,
        "qk_norm": True,
        "position_embedding": "rotary",
    },
    "norms after, of all heads, in branches of one input": {
        "norm_placement": "after",
        "activation": "gelu_exact",
        "parallel_branches": True,
        "key_value_heads": 2,
        "qk_norm": True,
        "qk_norm_over": "all",
        "position_embedding": "rotary",
        "rotary_fraction": 0.7,
        "convolution_size": 2,
        "tied_head": False,
    },
    "layers of three kinds": {
        "layers": 5,
        "layer_pattern": ("sliding", "sliding", "full", "nope"),
        "window": 3,
        "sliding_rotary_base": 10.0,
        "position_embedding": "rotary",
        "key_value_heads": 2,
        "attention_serialisation": 3,
    },
}


def small_model(name: str, **changes: object) -> Config:
    return small(**{"heads": 4, **MODELS[name], **changes})


def of(weights: "dict[str, torch.Tensor]", prefix: str) -> "dict[str, torch.Tensor]":
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}


def logits_by_formula(
    config: Config, weights: "dict[str, torch.Tensor]", words: np.ndarray
) -> torch.Tensor:
    """Logits of texts as long as the model's sequences, [B*S, V]."""
    model, ids = config.model, torch.from_numpy(words).reshape(-1).long()
    x = formulas.embedding(model, of(weights, "embedding."), ids)
    for n in range(model.layers):
        beside = ids if model.value_embeddings else None
        x = formulas.decoder(in_layer(model, n), of(weights, f"decoder.{n}."), x, beside)
    head = {"word.weight": weights["embedding.word.weight"], **of(weights, "head.")}
    return formulas.logits(model, head, x, torch.arange(len(ids)))


def in_layer(model: Model, number: int) -> Model:
    """The model as if all layers were of the kind of one."""
    if not model.layer_pattern:
        return model
    kind = model.layer_pattern[number % len(model.layer_pattern)]
    base = (kind == "sliding" and model.sliding_rotary_base) or model.rotary_base
    return dataclasses.replace(model, layer_pattern=(kind,), rotary_base=base)


def token_losses_by_formula(
    config: Config, weights: "dict[str, torch.Tensor]", words: np.ndarray, labels: np.ndarray
) -> torch.Tensor:
    """Losses of a batch, [B*S]."""
    logits = logits_by_formula(config, weights, words)
    target = torch.from_numpy(labels).reshape(-1).long()
    return torch.nn.functional.cross_entropy(logits, target, reduction="none")


def doubles(weights: "dict[str, np.ndarray]") -> "dict[str, torch.Tensor]":
    return {n: torch.from_numpy(w).double() for n, w in weights.items()}


def leaves(weights: "dict[str, np.ndarray]") -> "dict[str, torch.Tensor]":
    return {n: w.requires_grad_() for n, w in doubles(weights).items()}


def merged(config: Config, weights: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """The weights with what adapters add to them."""
    model, whole = config.model, dict(weights)
    for n in (n.removesuffix("lora_a") for n in weights if n.endswith("lora_a")):
        added = whole.pop(f"{n}lora_a") @ whole.pop(f"{n}lora_b")
        whole[f"{n}weight"] = weights[f"{n}weight"] + added * (model.lora_alpha / model.lora_rank)
    return whole


def check_logits_and_append(
    config: Config,
    weights: "dict[str, np.ndarray]",
    texts: "list[list[int]]",
    logits: np.ndarray,
) -> None:
    """Logits of what follows each text, by the formula; appends to each text the likeliest."""
    for text, row in zip(texts, logits, strict=True):
        sizes = {"sequence_length": len(text), "head_serialisation": 1}
        single = override(config, **sizes, attention_serialisation=1)
        expected = logits_by_formula(single, doubles(weights), np.array(text))[-1]
        np.testing.assert_allclose(row, expected, atol=3e-5)
        text.append(int(row.argmax()))
