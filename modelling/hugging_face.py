"""Names of parameters in Hugging Face's GPT-2: those of `GPT2LMHeadModel.state_dict`."""

import re

NAMES = {
    "embedding.word": "transformer.wte",
    "embedding.position": "transformer.wpe",
    "decoder.#.attention_norm": "transformer.h.#.ln_1",
    "decoder.#.attention.qkv": "transformer.h.#.attn.c_attn",
    "decoder.#.attention.output": "transformer.h.#.attn.c_proj",
    "decoder.#.feed_forward_norm": "transformer.h.#.ln_2",
    "decoder.#.feed_forward.up": "transformer.h.#.mlp.c_fc",
    "decoder.#.feed_forward.down": "transformer.h.#.mlp.c_proj",
    "head.norm": "transformer.ln_f",
}
"""Our modules and Hugging Face's; # is the block's number. Both keep linear weights as [in,
out].
"""

TIED = "lm_head.weight"
"""Hugging Face's second name for the word embedding."""


def hugging_face_name(name: str) -> str:
    """Hugging Face's name of one of our parameters."""
    module, _, kind = name.rpartition(".")
    number = re.search(r"\.(\d+)\.", module)
    pattern = re.sub(r"\.\d+\.", ".#.", module)
    return f"{NAMES[pattern].replace('#', number[1] if number else '')}.{kind}"
