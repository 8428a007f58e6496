"""`config.json` of Hugging Face's models: ours from theirs, and theirs from ours."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from popxl_gpt.config.presets import from_mapping
from popxl_gpt.config.schema import Model
from popxl_gpt.data.special_tokens import BEGIN, END, as_list
from popxl_gpt.modelling.hugging_face import FAMILIES, GPT2, LLAMA, OWN, QWEN3, Family
from popxl_gpt.utils.errors import UserError

Values = dict[str, Any]
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Names of the tanh form of GELU."""
FIXED: "Mapping[str, Mapping[str, tuple[Any, ...]]]" = {
    GPT2.model_type: {
        "activation_function": TANH_GELU,
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    LLAMA.model_type: {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    QWEN3.model_type: {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "use_sliding_window": (False,),
    },
    OWN.model_type: {},
}
"""What our model is: of each setting what it may be, the default of transformers first."""
_LLAMA_SIZES = {
    "vocabulary_size": ("vocab_size", 32000),
    "sequence_length": ("max_position_embeddings", 2048),
    "hidden_size": ("hidden_size", 4096),
    "layers": ("num_hidden_layers", 32),
    "heads": ("num_attention_heads", 32),
    "key_value_heads": ("num_key_value_heads", None),
    "feed_forward_size": ("intermediate_size", 11008),
    "layer_norm_eps": ("rms_norm_eps", 1e-6),
    "tied_head": ("tie_word_embeddings", False),
}
_CHOICES = (
    *("norm", "position_embedding", "rotary_base", "token_shift", "convolution_size"),
    *("rotary_scaling", "rotary_factor", "rotary_original_positions"),
    *("rotary_slow_turns", "rotary_fast_turns", "rotary_attention_factor"),
    *("qk_norm", "value_embeddings", "activation", "biases", "qkv_biases", "logit_softcap"),
)
"""Settings that our own family's configuration has by our names."""
_DEFAULTS = Model()
SIZES: "Mapping[str, Mapping[str, tuple[str, Any]]]" = {
    GPT2.model_type: {
        "vocabulary_size": ("vocab_size", 50257),
        "sequence_length": ("n_positions", 1024),
        "hidden_size": ("n_embd", 768),
        "layers": ("n_layer", 12),
        "heads": ("n_head", 12),
        "feed_forward_size": ("n_inner", None),
        "layer_norm_eps": ("layer_norm_epsilon", 1e-5),
        "tied_head": ("tie_word_embeddings", True),
    },
    LLAMA.model_type: _LLAMA_SIZES,
    QWEN3.model_type: {
        **_LLAMA_SIZES,
        "vocabulary_size": ("vocab_size", 151936),
        "sequence_length": ("max_position_embeddings", 32768),
        "key_value_heads": ("num_key_value_heads", 32),
        "feed_forward_size": ("intermediate_size", 22016),
    },
    OWN.model_type: {
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
}
"""Our settings, their names for them, and the defaults of transformers."""
CONFIGURATION = "PopxlGPTConfig"
"""Our family's class of it, in the file of its code."""
QUANTIZED = "quantization_config"
"""Says how transformers quantizes the weights when it loads them, be they floats in their files."""
QWEN3_HEAD = 128
"""Features of a head of Qwen3, where its configuration does not tell."""


def family_in(file: Path, values: Values) -> Family:
    """The family that a configuration names. UserError for one that is not known."""
    found = values.get("model_type")
    family = FAMILIES.get(found) if isinstance(found, str) else None
    if family is None:
        raise UserError(
            f"{file}: got model_type {json.dumps(found)}; expected one of {', '.join(FAMILIES)}, "
            "the architectures that are known here. Convert one of these."
        )
    return family


def model_in(file: Path, values: Values) -> Model:
    """Our configuration of a model; `sequence_length` is the number of its positions. UserError
    where it is another architecture.
    """
    family = family_in(file, values)
    if values.get(QUANTIZED) is not None:
        raise UserError(
            f"{file}: got {QUANTIZED}; expected a model whose weights are floats. Load it with "
            "transformers, call its dequantize() and save it with save_pretrained; or take the "
            "entry out if the weights were never quantized."
        )
    for name, expected in FIXED[family.model_type].items():
        _expect(file, name, values.get(name, expected[0]), expected)
    settings = {n: v for n, v in family.settings.items() if n in Model.__dataclass_fields__}
    sizes = {
        ours: values.get(theirs, default)
        for ours, (theirs, default) in SIZES[family.model_type].items()
    }
    rest: Values = {"end_of_text": _end_of_text(values, sizes["vocabulary_size"])}
    if family is OWN:
        rest["dropout"] = 0.0
    elif family is not GPT2:
        rest |= _rotary(file, values, family)
    try:
        return from_mapping({"model": {**settings, **sizes, **rest}}).model
    except UserError as error:
        raise UserError(f"{file}: {error}") from error


def special_tokens_in(values: Values, vocabulary: Any) -> "dict[str, int | list[int]]":
    """The tokens that texts begin and end with, by their names: one, or a list of several. What is
    no token is left out.
    """

    def is_token(value: Any) -> bool:
        return type(value) is int and type(vocabulary) is int and 0 <= value < vocabulary

    found: dict[str, int | list[int]] = {}
    for name in (BEGIN, END):
        value: Any = values.get(name)
        if is_token(value) or (isinstance(value, list) and value and all(map(is_token, value))):
            found[name] = value
    return found


def _end_of_text(values: Values, vocabulary: Any) -> int:
    """The token that ends documents, the first of several; 0 where none does."""
    ends = special_tokens_in(values, vocabulary).get(END)
    return next(iter(as_list(ends)), 0)


def _rotary(file: Path, values: Values, family: Family) -> Values:
    """What families with rotary positions have beside their sizes."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        rope = {"rope_type": rope}
    kind = rope.get("rope_type", rope.get("type", "default"))
    _expect(file, "rope_type", kind, ("default",))
    _expect(file, "partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), (1.0,))
    hidden, heads = (values.get(SIZES[family.model_type][n][0]) for n in ("hidden_size", "heads"))
    size = values.get("head_dim")
    if size is None and family is QWEN3:
        size = QWEN3_HEAD
    if isinstance(hidden, int) and isinstance(heads, int) and size and size * heads == hidden:
        size = None
    return {
        "head_size": size,
        "rotary_base": rope.get("rope_theta", values.get("rope_theta", 10000.0)),
        "dropout": 0.0,
    }


def _expect(file: Path, name: str, found: Any, expected: "tuple[Any, ...]") -> None:
    if found not in expected:
        allowed = ", ".join(
            value if isinstance(value, str) else json.dumps(value) for value in expected
        )
        raise UserError(
            f"{file}: got {name} {json.dumps(found)}; expected "
            f"{'one of ' if len(expected) > 1 else ''}{allowed}, as models have that are known "
            "here. Convert a model that has it."
        )


def config_of(
    model: Model,
    family: Family,
    kind: str,
    begin: "int | list[int] | None",
    end: "int | list[int] | None",
) -> Values:
    """Their configuration of a model of ours.

    Args:
        kind: type of the weights.
        begin, end: the tokens that texts begin and end with, one or several, which transformers has
            defaults for.
    """
    values: Values = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{name: expected[0] for name, expected in FIXED[family.model_type].items()},
        **{theirs: getattr(model, ours) for ours, (theirs, _) in SIZES[family.model_type].items()},
        BEGIN: begin,
        END: end,
        "torch_dtype": kind,
    }
    values[SIZES[family.model_type]["sequence_length"][0]] = model.positions
    if family is GPT2:
        dropped = ("attn_pdrop", "embd_pdrop", "resid_pdrop")
        return {**values, **dict.fromkeys(dropped, model.dropout)}
    values["num_key_value_heads"] = model.key_value
    values["intermediate_size"] = model.feed_forward
    if family.code is not None:
        module = family.code.stem
        classes = {
            "AutoConfig": f"{module}.{CONFIGURATION}",
            "AutoModelForCausalLM": f"{module}.{family.architecture}",
        }
        return {**values, "auto_map": classes}
    return {
        **values,
        "head_dim": model.head_width,
        "rope_theta": model.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
    }
