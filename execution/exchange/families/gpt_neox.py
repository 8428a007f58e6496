"""GPT-NeoX and Pythia: part of a head's features turns, and both branches may have one input."""

from dataclasses import replace

from popxl_gpt.config.schema import Model
from popxl_gpt.execution.exchange.families import rotary_decoder as shared
from popxl_gpt.execution.exchange.families.family import Family, TheirConfig, Values
from popxl_gpt.execution.exchange.families.gpt2 import EXACT_GELU, GELUS, gelu_in, gelu_of

HEAD = "embed_out"
BASE, PART = "rotary_emb_base", "rotary_pct"
"""Their names of what others call rope_theta and partial_rotary_factor."""
SIZES = {
    "vocabulary_size": ("vocab_size", 50432),
    "sequence_length": ("max_position_embeddings", 2048),
    "hidden_size": ("hidden_size", 6144),
    "layers": ("num_hidden_layers", 44),
    "heads": ("num_attention_heads", 64),
    "feed_forward_size": ("intermediate_size", 24576),
    "layer_norm_eps": ("layer_norm_eps", 1e-5),
    "tied_head": ("tie_word_embeddings", False),
    "parallel_branches": ("use_parallel_residual", True),
}


def _read(theirs: TheirConfig) -> Values:
    named = {"rope_theta": theirs.get(BASE), "partial_rotary_factor": theirs.get(PART, 0.25)}
    told = replace(theirs, values={**theirs.values, **named, "head_dim": None})
    activation = gelu_in(theirs, "hidden_act", EXACT_GELU[0])
    return {"activation": activation, **shared.read(told, SIZES, turns_in_part=True)}


def _write(model: Model) -> Values:
    """Activation and positions, by the names of both forms that transformers has had."""
    values = shared.write(model)
    names = ("intermediate_size", "max_position_embeddings", *shared.ROPE)
    found = {name: values[name] for name in names if name in values}
    found["rope_parameters"]["partial_rotary_factor"] = model.rotary_fraction
    own = {BASE: model.rotary_base, PART: model.rotary_fraction}
    return {**found, **own, "hidden_act": gelu_of(model)}


GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    settings={"position_embedding": "rotary", "has_own_head_size": False},
    modules={
        "embedding.word": ("embed_in",),
        "decoder.#.attention_norm": ("layers.#.input_layernorm",),
        "decoder.#.attention.qkv": ("layers.#.attention.query_key_value",),
        "decoder.#.attention.output": ("layers.#.attention.dense",),
        "decoder.#.feed_forward_norm": ("layers.#.post_attention_layernorm",),
        "decoder.#.feed_forward.up": ("layers.#.mlp.dense_h_to_4h",),
        "decoder.#.feed_forward.down": ("layers.#.mlp.dense_4h_to_h",),
        "head.norm": ("final_layer_norm",),
        "head.output": (HEAD,),
    },
    is_transposed=True,
    sizes=SIZES,
    fixed={"attention_bias": (True,)},
    read=_read,
    write=_write,
    varied=(*shared.VARIED, "rotary_fraction", "activation"),
    allowed={"activation": GELUS},
    buffers=(
        *("layers.#.attention.bias", "layers.#.attention.masked_bias"),
        "layers.#.attention.rotary_emb.inv_freq",
    ),
    is_loaded=lambda model: model.hidden_size % model.heads == 0,
    head=HEAD,
    is_grouped=True,
)
