"""Llama 2, 3, 3.1 to 3.3, and models of its architecture, such as SmolLM2."""

from popxl_gpt.execution.exchange.families import rotary_decoder as shared
from popxl_gpt.execution.exchange.families.family import Family

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    settings=shared.SETTINGS,
    modules=shared.MODULES,
    is_transposed=True,
    sizes=shared.SIZES,
    fixed={"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    read=lambda theirs: shared.read(theirs, shared.SIZES),
    write=shared.write,
    varied=shared.VARIED,
    buffers=shared.BUFFERS,
    is_loaded=lambda model: model.hidden_size % model.heads == 0,
)
