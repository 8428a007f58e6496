"""Our own family, for models of no other one: its code goes beside the weights."""

from pathlib import Path

from popxl_gpt.config.schema import Model
from popxl_gpt.execution.exchange.families.family import OUTSIDE, Family, TheirConfig, Values

ARCHITECTURE = "PopxlGPTForCausalLM"
CONFIGURATION = "PopxlGPTConfig"
"""The classes in the file of its code."""
CODE = Path(__file__).parents[3] / "modelling" / "modeling_popxl_gpt.py"
_MODULES = (
    *("embedding.word", "embedding.shift", "embedding.bigram", "embedding.position"),
    *(
        f"decoder.#.{name}"
        for name in (
            "attention_norm",
            "attention_convolution",
            "attention.qkv",
            "attention.convolution",
            "attention.query_norm",
            "attention.key_norm",
            "attention.value_embedding",
            "attention.output",
            "feed_forward_norm",
            "feed_forward_convolution",
            "feed_forward.up",
            "feed_forward.down",
        )
    ),
)
_CHOICES = (
    *("norm", "position_embedding", "rotary_base", "token_shift", "bigram_rows"),
    *("rotary_scaling", "rotary_factor", "rotary_original_positions", "convolution_size"),
    *("rotary_slow_turns", "rotary_fast_turns", "rotary_attention_factor"),
    *("qk_norm", "value_embeddings", "activation", "biases", "qkv_biases", "logit_softcap"),
)
"""Settings that its configuration has by our names."""
_DEFAULTS = Model()


def _read(theirs: TheirConfig) -> Values:
    return {"dropout": 0.0}


def _write(model: Model) -> Values:
    return {
        "num_key_value_heads": model.key_value,
        "intermediate_size": model.feed_forward,
        "auto_map": {
            "AutoConfig": f"{CODE.stem}.{CONFIGURATION}",
            "AutoModelForCausalLM": f"{CODE.stem}.{ARCHITECTURE}",
        },
    }


OWN = Family(
    model_type="popxl_gpt",
    architecture=ARCHITECTURE,
    prefix="",
    settings={},
    modules={
        **{name: (name,) for name in _MODULES},
        "head.norm": ("norm",),
        "head.output": (OUTSIDE,),
    },
    is_transposed=False,
    sizes={
        "vocabulary_size": ("vocab_size", 50257),
        "sequence_length": ("max_position_embeddings", 1024),
        "hidden_size": ("hidden_size", 768),
        "layers": ("num_hidden_layers", 12),
        "heads": ("num_attention_heads", 12),
        "key_value_heads": ("num_key_value_heads", 12),
        "head_size": ("head_dim", None),
        "feed_forward_size": ("intermediate_size", 3072),
        "tied_head": ("tie_word_embeddings", True),
        "layer_norm_eps": ("norm_eps", 1e-5),
        **{name: (name, getattr(_DEFAULTS, name)) for name in _CHOICES},
    },
    fixed={},
    allowed={"activation": ("gelu", "relu2", "swiglu")},
    read=_read,
    write=_write,
    code=CODE,
)
