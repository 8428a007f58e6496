"""Mistral without sliding windows, and Nemo, whose heads have a size of their own."""

from popxl_gpt.execution.exchange.families import rotary_decoder as shared
from popxl_gpt.execution.exchange.families.family import Family, TheirConfig, Values

SIZES = {
    **shared.SIZES,
    "sequence_length": ("max_position_embeddings", 131072),
    "key_value_heads": ("num_key_value_heads", 8),
    "feed_forward_size": ("intermediate_size", 14336),
}


def _read(theirs: TheirConfig) -> Values:
    shared.check_window(theirs, SIZES)
    return shared.read(theirs, SIZES)


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    prefix="model.",
    settings=shared.SETTINGS,
    modules=shared.MODULES,
    is_transposed=True,
    sizes=SIZES,
    fixed={"hidden_act": ("silu",)},
    read=_read,
    write=lambda model: {**shared.write(model), "sliding_window": None},
    varied=shared.VARIED,
    buffers=shared.BUFFERS,
)
