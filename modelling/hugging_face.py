"""Families of models at Hugging Face that are ours with some settings, and one of our own for all
others: what these are, and how their state dicts hold our parameters.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from popxl_gpt.config.schema import Model
from popxl_gpt.modelling.parameters import Parameter, Role

HEAD = "lm_head.weight"
"""The head's matrix; of a tied one a second name for the word embedding."""
OUTSIDE = "lm_head"
"""The one module outside a family's prefix."""


@dataclass(frozen=True, eq=False)
class Family:
    """A type of models."""

    model_type: str
    architecture: str
    """The class in transformers."""
    prefix: str
    """The prefix of all names but the head's; files of the bare model leave it out."""
    settings: Mapping[str, Any]
    """What our model must be set to."""
    modules: "Mapping[str, tuple[str, ...]]"
    """Theirs by ours, without the prefix; # is the block's number. Several stand side by side in
    ours.
    """
    is_transposed: bool
    """Whether linear weights lie [out, in]."""
    buffers: "tuple[str, ...]" = ()
    """Tensors of their files that are no weights, named as in `modules`: the class makes them."""
    code: Path | None = None
    """A file to put beside the weights, which has the class; none: transformers has it."""

    def fits(self, model: Model) -> bool:
        """Whether a model of ours is one of the family."""
        return all(getattr(model, name) == value for name, value in self.settings.items())

    def names(self, name: str) -> "tuple[str, ...]":
        """Their tensors that are one of our parameters."""
        module, _, kind = name.rpartition(".")
        number = re.search(r"\.(\d+)\.", module)
        found = self.modules[re.sub(r"\.\d+\.", ".#.", module)]
        whole = (their if their == OUTSIDE else self.prefix + their for their in found)
        return tuple(f"{their.replace('#', number[1] if number else '')}.{kind}" for their in whole)

    def is_buffer(self, name: str) -> bool:
        """Whether a tensor of theirs is no weight."""
        return re.sub(r"\.\d+\.", ".#.", name.removeprefix(self.prefix)) in self.buffers

    def shapes(self, name: str, parameter: Parameter) -> "dict[str, tuple[int, ...]]":
        """Shapes of their tensors that are one of our parameters, in order."""
        *before, length = parameter.shape
        shapes = [(*before, size) for size in self._sizes(name, parameter, length)]
        return {
            their: shape[::-1] if self._turns(parameter) else shape
            for their, shape in zip(self.names(name), shapes)
        }

    def joined(self, parameter: Parameter, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """One of our parameters from their tensors."""
        ours = [array.T if self._turns(parameter) else array for array in arrays]
        return ours[0] if len(ours) == 1 else np.concatenate(ours, axis=-1)

    def split(self, name: str, parameter: Parameter, array: np.ndarray) -> "dict[str, np.ndarray]":
        """Their tensors from one of our parameters."""
        ends = list(accumulate(self._sizes(name, parameter, array.shape[-1])))
        parts = np.split(array, ends[:-1], axis=-1)
        return {
            their: part.T if self._turns(parameter) else part
            for their, part in zip(self.names(name), parts)
        }

    def _turns(self, parameter: Parameter) -> bool:
        return self.is_transposed and parameter.role is Role.WEIGHT

    def _sizes(self, name: str, parameter: Parameter, length: int) -> "list[int]":
        if len(self.names(name)) == 1:
            return [length]
        return [length // sum(parameter.blocks) * size for size in parameter.blocks]


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    settings={
        "norm": "layer_norm",
        "position_embedding": "learned",
        "token_shift": False,
        "convolution_size": 1,
        "shares_keys": False,
        "has_own_head_size": False,
        "qk_norm": False,
        "value_embeddings": False,
        "activation": "gelu",
        "biases": True,
        "has_qkv_biases": True,
        "logit_softcap": 0.0,
    },
    modules={
        "embedding.word": ("wte",),
        "embedding.position": ("wpe",),
        "decoder.#.attention_norm": ("h.#.ln_1",),
        "decoder.#.attention.qkv": ("h.#.attn.c_attn",),
        "decoder.#.attention.output": ("h.#.attn.c_proj",),
        "decoder.#.feed_forward_norm": ("h.#.ln_2",),
        "decoder.#.feed_forward.up": ("h.#.mlp.c_fc",),
        "decoder.#.feed_forward.down": ("h.#.mlp.c_proj",),
        "head.norm": ("ln_f",),
        "head.output": (OUTSIDE,),
    },
    is_transposed=False,
    buffers=("h.#.attn.bias", "h.#.attn.masked_bias"),
)
_LLAMA = {
    "norm": "rms_norm",
    "position_embedding": "rotary",
    "token_shift": False,
    "convolution_size": 1,
    "value_embeddings": False,
    "activation": "swiglu",
    "biases": False,
    "has_qkv_biases": False,
    "logit_softcap": 0.0,
}
_LLAMA_MODULES = {
    "embedding.word": ("embed_tokens",),
    "decoder.#.attention_norm": ("layers.#.input_layernorm",),
    "decoder.#.attention.qkv": tuple(f"layers.#.self_attn.{name}_proj" for name in "qkv"),
    "decoder.#.attention.output": ("layers.#.self_attn.o_proj",),
    "decoder.#.feed_forward_norm": ("layers.#.post_attention_layernorm",),
    "decoder.#.feed_forward.up": ("layers.#.mlp.gate_proj", "layers.#.mlp.up_proj"),
    "decoder.#.feed_forward.down": ("layers.#.mlp.down_proj",),
    "head.norm": ("norm",),
    "head.output": (OUTSIDE,),
}
_LLAMA_BUFFERS = ("layers.#.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq")
LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    settings={**_LLAMA, "qk_norm": False},
    modules=_LLAMA_MODULES,
    is_transposed=True,
    buffers=_LLAMA_BUFFERS,
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    prefix="model.",
    settings={**_LLAMA, "qk_norm": True},
    modules={
        **_LLAMA_MODULES,
        "decoder.#.attention.query_norm": ("layers.#.self_attn.q_norm",),
        "decoder.#.attention.key_norm": ("layers.#.self_attn.k_norm",),
    },
    is_transposed=True,
    buffers=_LLAMA_BUFFERS,
)
_OWN_MODULES = (
    *("embedding.word", "embedding.shift", "embedding.position"),
    *(
        f"decoder.#.{name}"
        for name in (
            "attention_norm",
            "attention_convolution",
            "attention.qkv",
            "attention.convolution",
            "attention.query_norm",
            "attention.key_norm",
            "attention.value_embedding",
            "attention.output",
            "feed_forward_norm",
            "feed_forward_convolution",
            "feed_forward.up",
            "feed_forward.down",
        )
    ),
)
OWN = Family(
    model_type="popxl_gpt",
    architecture="PopxlGPTForCausalLM",
    prefix="",
    settings={},
    modules={
        **{name: (name,) for name in _OWN_MODULES},
        "head.norm": ("norm",),
        "head.output": (OUTSIDE,),
    },
    is_transposed=False,
    code=Path(__file__).with_name("modeling_popxl_gpt.py"),
)
FAMILIES = {family.model_type: family for family in (GPT2, LLAMA, QWEN3, OWN)}
"""All families, by type. A model that fits several is of the first one."""


def family_of(model: Model) -> Family:
    """The family that a model of ours is of."""
    return next(family for family in FAMILIES.values() if family.fits(model))


def hugging_face_name(name: str) -> str:
    """GPT-2's name of one of our parameters."""
    (found,) = GPT2.names(name)
    return found
