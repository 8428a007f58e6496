"""Gemma 2 and 3, of text: norms around branches, GEGLU, scaled embeddings, windows."""

import math
from typing import Any

from popxl_gpt.config.model import FULL, NOPE, SLIDING
from popxl_gpt.config.schema import Model
from popxl_gpt.execution.exchange.families import rotary_decoder as shared
from popxl_gpt.execution.exchange.families.family import Family, TheirConfig, Values

SETTINGS = {
    **shared.SETTINGS, "activation": "geglu", "norm_placement": "around",
    "zero_centered_gains": True,
}  # fmt: skip
MODULES = {
    **shared.MODULES,
    "decoder.#.attention_output_norm": ("layers.#.post_attention_layernorm",),
    "decoder.#.feed_forward_norm": ("layers.#.pre_feedforward_layernorm",),
    "decoder.#.feed_forward_output_norm": ("layers.#.post_feedforward_layernorm",),
}
SIZES = {
    **shared.SIZES,
    "vocabulary_size": ("vocab_size", 256000),
    "sequence_length": ("max_position_embeddings", 8192),
    "hidden_size": ("hidden_size", 2304),
    "layers": ("num_hidden_layers", 26),
    "heads": ("num_attention_heads", 8),
    "key_value_heads": ("num_key_value_heads", 4),
    "feed_forward_size": ("intermediate_size", 9216),
    "tied_head": ("tie_word_embeddings", True),
}
SIZES3 = {
    **SIZES,
    "vocabulary_size": ("vocab_size", 262208),
    "sequence_length": ("max_position_embeddings", 131072),
}
LOCAL_BASE = "rope_local_base_freq"
HEAD_SIZE = 256
SCALAR = 256
"""The number whose root divides scores, where the configuration does not say."""
FIXED = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "use_bidirectional_attention": (None, False),
}
FIXED3 = {**FIXED, "attn_logit_softcapping": (None,)}
"""The same of Gemma 3, in whose class the bound of scores does nothing."""
VARIED = ("embedding_scale", "attention_scale", "logit_softcap")


def _read(theirs: TheirConfig, caps: "tuple[float | None, float | None]") -> Values:
    """What both have in common.

    Args:
        caps: of scores and of logits, where the configuration does not say.
    """
    hidden, scalar = theirs.get(*SIZES["hidden_size"]), theirs.get("query_pre_attn_scalar", SCALAR)
    score, logit = (
        theirs.get(f"{name}_logit_softcapping", cap) for name, cap in zip(("attn", "final"), caps)
    )
    found: Values = {"score_softcap": score or 0.0, "logit_softcap": logit or 0.0}
    if _is_count(hidden):
        found["embedding_scale"] = math.sqrt(hidden)
    if not _is_count(scalar):
        theirs.refuse(f"got query_pre_attn_scalar {scalar!r}; expected a whole number, 1 or more.")
    return {**found, "attention_scale": scalar**-0.5}


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _write(model: Model) -> Values:
    return {
        "query_pre_attn_scalar": _scalar(model),
        "attn_logit_softcapping": model.score_softcap or None,
        "final_logit_softcapping": model.logit_softcap or None,
    }


def _scalar(model: Model) -> int:
    return round(model.score_scale**-2)


def _is_loaded(model: Model) -> bool:
    is_scaled = math.isclose(model.embedding_scale, math.sqrt(model.hidden_size), rel_tol=1e-6)
    is_whole = math.isclose(_scalar(model) ** -0.5, model.score_scale, rel_tol=1e-6)
    return is_scaled and is_whole and model.hidden_size % model.heads == 0


def _read2(theirs: TheirConfig) -> Values:
    kinds = shared.named_kinds(theirs, theirs.get(*SIZES["layers"])) or [SLIDING, FULL]
    return {
        **shared.read(theirs, SIZES, HEAD_SIZE, scalings=()),
        **_read(theirs, (50.0, 30.0)),
        **shared.read_windows(theirs, SIZES, kinds),
    }


def _read3(theirs: TheirConfig) -> Values:
    every = theirs.get("sliding_window_pattern", 6)
    theirs.expect("sliding_window_pattern", every, tuple(range(1, 65)))
    named = shared.named_kinds(theirs, theirs.get(*SIZES3["layers"]))
    return {
        **shared.read_by_kind(theirs, SIZES3, (1e6, 1e4), HEAD_SIZE, local=LOCAL_BASE),
        **_read(theirs, (None, None)),
        **shared.read_windows(theirs, SIZES3, named or [SLIDING] * (every - 1) + [FULL], True),
    }


def _write2(model: Model) -> Values:
    return {**shared.write(model), **shared.write_kinds(model), **_write(model)}


def _write3(model: Model) -> Values:
    local = model.of_kind(SLIDING).rotary_base
    return {**shared.write_by_kind(model), **_write(model), LOCAL_BASE: local}


GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    prefix="model.",
    settings=SETTINGS,
    modules=MODULES,
    is_transposed=True,
    sizes=SIZES,
    fixed=FIXED,
    read=_read2,
    write=_write2,
    varied=("head_size", "rotary_base", "score_softcap", *shared.KINDS, *VARIED),
    is_loaded=lambda model: _is_loaded(model) and NOPE not in model.kinds,
    buffers=shared.BUFFERS,
)
GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    prefix="model.",
    settings={**SETTINGS, "qk_norm": True},
    modules={
        **MODULES,
        "decoder.#.attention.query_norm": ("layers.#.self_attn.q_norm",),
        "decoder.#.attention.key_norm": ("layers.#.self_attn.k_norm",),
    },
    is_transposed=True,
    sizes=SIZES3,
    fixed=FIXED3,
    read=_read3,
    write=_write3,
    varied=(*shared.VARIED, *shared.BY_KIND, *VARIED),
    is_loaded=lambda model: _is_loaded(model) and shared.turns_by_kind(model),
    buffers=shared.BUFFERS,
)
