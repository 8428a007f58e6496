"""Mistral, with windows in all layers or in none, and Nemo, whose heads have their own size."""

from popxl_gpt.config.model import FULL, SLIDING
from popxl_gpt.config.schema import Model
from popxl_gpt.execution.exchange.families import rotary_decoder as shared
from popxl_gpt.execution.exchange.families.family import Family, TheirConfig, Values

SIZES = {
    **shared.SIZES,
    "sequence_length": ("max_position_embeddings", 131072),
    "key_value_heads": ("num_key_value_heads", 8),
    "feed_forward_size": ("intermediate_size", 14336),
}


def _read(theirs: TheirConfig) -> Values:
    return {**shared.read(theirs, SIZES), **shared.read_windows(theirs, SIZES, [SLIDING])}


def _write(model: Model) -> Values:
    return {**shared.write(model), "sliding_window": model.sliding_window}


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
    write=_write,
    varied=(*shared.VARIED, *shared.KINDS),
    is_loaded=lambda model: {*model.kinds} in ({FULL}, {SLIDING}),
    buffers=shared.BUFFERS,
)
