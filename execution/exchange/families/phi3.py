"""Phi-3, with windows in all layers or in none, and Phi-4: fused projections, partial rotation."""

from dataclasses import replace

from popxl_gpt.config.model import FULL, SLIDING
from popxl_gpt.config.schema import Model
from popxl_gpt.execution.exchange.families import rotary_decoder as shared
from popxl_gpt.execution.exchange.families.family import Family, TheirConfig, Values

SIZES = {
    **shared.SIZES,
    "vocabulary_size": ("vocab_size", 32064),
    "sequence_length": ("max_position_embeddings", 4096),
    "hidden_size": ("hidden_size", 3072),
    "feed_forward_size": ("intermediate_size", 8192),
    "layer_norm_eps": ("rms_norm_eps", 1e-5),
}


def _read(theirs: TheirConfig) -> Values:
    told = replace(theirs, values={"sliding_window": None, **theirs.values})
    found = shared.read(theirs, SIZES, scalings=(), turns_in_part=True)
    return {**found, **shared.read_windows(told, SIZES, [SLIDING])}


def _write(model: Model) -> Values:
    return {**shared.write(model), "sliding_window": model.sliding_window}


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    prefix="model.",
    settings=shared.SETTINGS,
    modules={
        **shared.MODULES,
        "decoder.#.attention.qkv": ("layers.#.self_attn.qkv_proj",),
        "decoder.#.feed_forward.up": ("layers.#.mlp.gate_up_proj",),
    },
    is_transposed=True,
    sizes=SIZES,
    fixed={"hidden_act": ("silu",), "attention_bias": (False,)},
    read=_read,
    write=_write,
    varied=("head_size", "rotary_base", "rotary_fraction", *shared.KINDS),
    is_loaded=lambda model: {*model.kinds} in ({FULL}, {SLIDING}),
    buffers=shared.BUFFERS,
)
