"""Qwen3, dense: norms of queries and keys, heads of a size of their own."""

from popxl_gpt.config.model import NOPE
from popxl_gpt.execution.exchange.families import rotary_decoder as shared
from popxl_gpt.execution.exchange.families.family import Family

HEAD_SIZE = 128
"""Features of a head where the configuration does not say."""
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    prefix="model.",
    settings={**shared.SETTINGS, "qk_norm": True},
    modules={
        **shared.MODULES,
        "decoder.#.attention.query_norm": ("layers.#.self_attn.q_norm",),
        "decoder.#.attention.key_norm": ("layers.#.self_attn.k_norm",),
    },
    is_transposed=True,
    sizes=shared.QWEN_SIZES,
    fixed={**shared.QWEN_FIXED, "attention_bias": (False,)},
    read=lambda theirs: shared.read_qwen(theirs, HEAD_SIZE),
    write=shared.write_qwen,
    varied=(*shared.VARIED, *shared.KINDS),
    is_loaded=lambda model: NOPE not in model.kinds,
    buffers=shared.BUFFERS,
)
