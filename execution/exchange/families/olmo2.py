"""OLMo 2: norms of what branches add, and of all queries and keys of a token."""

from popxl_gpt.execution.exchange.families import rotary_decoder as shared
from popxl_gpt.execution.exchange.families.family import Family

SETTINGS = {
    **shared.SETTINGS, "norm_placement": "after", "qk_norm": True, "qk_norm_over": "all",
}  # fmt: skip
MODULES = {
    **{ours: theirs for ours, theirs in shared.MODULES.items() if not ours.endswith("_norm")},
    "decoder.#.attention.query_norm": ("layers.#.self_attn.q_norm",),
    "decoder.#.attention.key_norm": ("layers.#.self_attn.k_norm",),
    "decoder.#.attention_output_norm": ("layers.#.post_attention_layernorm",),
    "decoder.#.feed_forward_output_norm": ("layers.#.post_feedforward_layernorm",),
}
SIZES = {
    **shared.SIZES,
    "vocabulary_size": ("vocab_size", 50304),
    "layer_norm_eps": ("rms_norm_eps", 1e-5),
}
FIXED = {"hidden_act": ("silu",), "attention_bias": (False,)}
OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    prefix="model.",
    settings=SETTINGS,
    modules=MODULES,
    is_transposed=True,
    sizes=SIZES,
    fixed=FIXED,
    read=lambda theirs: shared.read(theirs, SIZES),
    write=shared.write,
    varied=shared.VARIED,
    buffers=shared.BUFFERS,
)
