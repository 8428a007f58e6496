"""Qwen2 and Qwen2.5: biases of queries, keys and values alone."""

from popxl_gpt.config.model import NOPE
from popxl_gpt.execution.exchange.families import rotary_decoder as shared
from popxl_gpt.execution.exchange.families.family import Family

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    prefix="model.",
    settings={**shared.SETTINGS, "qkv_biases": True},
    modules=shared.MODULES,
    is_transposed=True,
    sizes=shared.QWEN_SIZES,
    fixed=shared.QWEN_FIXED,
    read=shared.read_qwen,
    write=shared.write_qwen,
    varied=(*shared.VARIED, *shared.KINDS),
    is_loaded=lambda model: NOPE not in model.kinds,
    buffers=shared.BUFFERS,
)
