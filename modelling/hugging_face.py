"""Weights from and to Hugging Face's GPT-2: arrays under the names of
`GPT2LMHeadModel.state_dict`.
"""

import re
from collections.abc import Mapping

import numpy as np

from config import Execution, Model, UserError
from modelling.gpt import model_table, shard_weights, unshard_weights

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


def from_hugging_face(
    tensors: Mapping[str, np.ndarray], model: Model, execution: Execution
) -> "dict[str, np.ndarray]":
    """Host data of our variables, by our names, from Hugging Face's whole tensors.

    Names without the prefix `transformer.`, as in files of the bare model, are accepted.

    Raises:
        UserError: lists tensors that are missing or have another shape; tensors that we have no use
            for are ignored.
    """
    whole, problems = {}, []
    for name, parameter in model_table(model).items():
        theirs = hugging_face_name(name)
        found = tensors.get(theirs, tensors.get(theirs.removeprefix("transformer.")))
        if found is None:
            problems.append(f"{theirs} is missing")
        elif tuple(found.shape) != parameter.shape:
            problems.append(f"{theirs} has shape {list(found.shape)}, not {list(parameter.shape)}")
        else:
            whole[name] = np.asarray(found, dtype=np.float32)
    if problems:
        raise UserError(
            f"Hugging Face weights: got tensors of another model: {'; '.join(problems)}. "
            "Give the model the configuration of these weights."
        )
    return shard_weights(whole, model, execution)


def to_hugging_face(
    pieces: Mapping[str, np.ndarray], model: Model, execution: Execution
) -> "dict[str, np.ndarray]":
    """Hugging Face's whole tensors, the tied head included, from the host data of our variables."""
    whole = unshard_weights(pieces, model, execution)
    tensors = {hugging_face_name(name): array for name, array in whole.items()}
    return {**tensors, TIED: tensors["transformer.wte.weight"]}
