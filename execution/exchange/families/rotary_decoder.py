"""What Llama and those after it share: RMS norms, rotary positions, SwiGLU, and their names."""

import json
from dataclasses import replace
from typing import Any

from popxl_gpt.config.model import FULL, NOPE, SLIDING
from popxl_gpt.config.schema import Model
from popxl_gpt.execution.exchange.families.family import OUTSIDE, TheirConfig, Values
from popxl_gpt.utils.files.bounded import shown

SETTINGS = {
    "norm": "rms_norm",
    "position_embedding": "rotary",
    "activation": "swiglu",
    "biases": False,
}
VARIED = (
    *("head_size", "rotary_base", "rotary_scaling", "rotary_factor", "rotary_original_positions"),
    *("rotary_slow_turns", "rotary_fast_turns", "rotary_attention_factor"),
)
MODULES = {
    "embedding.word": ("embed_tokens",),
    "decoder.#.attention_norm": ("layers.#.input_layernorm",),
    "decoder.#.attention.qkv": tuple(f"layers.#.self_attn.{name}_proj" for name in "qkv"),
    "decoder.#.attention.output": ("layers.#.self_attn.o_proj",),
    "decoder.#.feed_forward_norm": ("layers.#.post_attention_layernorm",),
    "decoder.#.feed_forward.up": ("layers.#.mlp.gate_proj", "layers.#.mlp.up_proj"),
    "decoder.#.feed_forward.down": ("layers.#.mlp.down_proj",),
    "head.norm": ("norm",),
    "head.output": (OUTSIDE,),
}
BUFFERS = ("layers.#.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq")
SIZES: "dict[str, tuple[str, Any]]" = {
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
QWEN_SIZES = {
    **SIZES,
    "vocabulary_size": ("vocab_size", 151936),
    "sequence_length": ("max_position_embeddings", 32768),
    "key_value_heads": ("num_key_value_heads", 32),
    "feed_forward_size": ("intermediate_size", 22016),
}
QWEN_FIXED = {"hidden_act": ("silu",), "use_sliding_window": (False, True)}
KINDS = ("layer_pattern", "window")
"""Settings that families with windows have beside `VARIED`."""
BY_KIND = (*KINDS, "sliding_rotary_base", "sliding_rotary_scaling")
"""Settings of families whose full and sliding layers turn apart."""
_KINDS = {"full_attention": FULL, "sliding_attention": SLIDING}
MOST_LAYERS = 2**16
"""Layers beyond which a configuration is refused for their number."""
WINDOW = 4096
"""Tokens of a window where a family has them and its configuration does not say how many."""
SCALINGS = ("linear", "dynamic", "llama3", "yarn")
"""Kinds of scaled positions, which have the same names there and here."""
ROPE = ("rope_scaling", "rope_parameters")
"""Names of the record of positions: the older one, which transformers takes first, and today's."""


def read(
    theirs: TheirConfig,
    sizes: "dict[str, tuple[str, Any]]",
    head_size: Any = None,
    scalings: "tuple[str, ...]" = SCALINGS,
    turns_in_part: bool = False,
) -> Values:
    """Head size and positions.

    Args:
        head_size: where the configuration does not say; none: their hidden size over their heads.
        scalings: kinds of scaled positions that the family has.
        turns_in_part: whether heads of the family may turn in part.
    """
    hidden, heads, positions = (
        theirs.get(*sizes[name]) for name in ("hidden_size", "heads", "sequence_length")
    )
    size = theirs.get("head_dim")
    size = head_size if size is None else size
    if all(isinstance(n, int) for n in (size, heads, hidden)) and size * heads == hidden:
        size = None
    rotary = _positions(theirs, positions, scalings, turns_in_part)
    return {"head_size": size, "dropout": 0.0, **rotary}


def _positions(
    theirs: TheirConfig, positions: Any, scalings: "tuple[str, ...]", turns_in_part: bool
) -> Values:
    """How queries and keys turn."""
    name = next((name for name in ROPE if theirs.get(name)), ROPE[-1])
    rope = theirs.get(name) or {}
    if not isinstance(rope, dict):
        rope = {"rope_type": rope}

    def of(entry: str, default: Any = None) -> Any:
        return default if rope.get(entry) is None else rope[entry]

    kind = of("rope_type", of("type", "default"))
    theirs.expect("rope_type", kind, ("default", *scalings))
    for entry, value in rope.items():
        if isinstance(value, (dict, list)):
            theirs.refuse(
                f"got {name} with several values of {shown(entry)}; expected one kind of positions "
                "in all layers. Convert a model that has it."
            )
    part = of("partial_rotary_factor", theirs.get("partial_rotary_factor"))
    part = 1.0 if part is None else part
    if not turns_in_part:
        theirs.expect("partial_rotary_factor", part, (1.0,))
    base = of("rope_theta", theirs.get("rope_theta"))
    found = {"rotary_base": 10000.0 if base is None else base, "rotary_fraction": part}
    if kind == "default":
        return found
    original = theirs.get("original_max_position_embeddings")
    original = original or of("original_max_position_embeddings", positions)
    factor = of("factor")
    is_told = kind != "yarn" or factor is not None
    if not is_told and all(isinstance(n, int) and 0 < n < 2**63 for n in (positions, original)):
        factor = positions / original
    found |= {"rotary_scaling": kind, "rotary_factor": factor}
    if kind == "dynamic":
        found["rotary_original_positions"] = positions
    elif kind != "linear":
        found["rotary_original_positions"] = original
    if kind == "llama3":
        found["rotary_slow_turns"] = of("low_freq_factor")
        found["rotary_fast_turns"] = of("high_freq_factor")
    if kind == "yarn":
        theirs.expect("mscale", of("mscale"), (None,))
        theirs.expect("mscale_all_dim", of("mscale_all_dim"), (None,))
        theirs.expect("truncate", of("truncate", True), (True,))
        found["rotary_slow_turns"] = of("beta_slow", 1.0)
        found["rotary_fast_turns"] = of("beta_fast", 32.0)
        found["rotary_attention_factor"] = of("attention_factor")
    return found


def read_by_kind(
    theirs: TheirConfig,
    sizes: "dict[str, tuple[str, Any]]",
    bases: "tuple[float, float]",
    head_size: Any = None,
    local: str | None = None,
) -> Values:
    """`read`, where full and sliding layers turn apart: positions are scaled in full ones alone.

    Args:
        bases: of full and of sliding layers, where the configuration does not say.
        local: the older name of the base of sliding layers, in a family that has one.
    """
    scaling, record = (theirs.get(name) or {} for name in ROPE)
    is_by_kind = isinstance(record, dict) and not {*record}.isdisjoint(_KINDS)
    full, sliding = (record.get(kind) or {} if is_by_kind else {} for kind in _KINDS)
    full = full if is_by_kind else record
    if not all(isinstance(found, dict) for found in (scaling, full, sliding)):
        theirs.refuse(
            f"got {ROPE[0]} {shown(scaling)} and {ROPE[1]} {shown(record)}; expected a record, or "
            "one for each kind of layers. Correct it."
        )
    if local is not None and {*full} - {"rope_type"} and not is_by_kind:
        theirs.refuse(
            f"got {ROPE[1]} {shown(record)} for all layers, which transformers passes over in this "
            f"family; expected a record for each of {' and '.join(_KINDS)}. Write it so."
        )
    full = {**full, **scaling}
    theirs.expect("rope_type", sliding.get("rope_type", "default"), ("default",))
    base = full.get("rope_theta", theirs.get("rope_theta", bases[0]))
    own = sliding.get("rope_theta", bases[1] if local is None else theirs.get(local, bases[1]))
    full = {**full, "rope_theta": base}
    flat = {**theirs.values, ROPE[0]: None, ROPE[1]: full}
    found = read(replace(theirs, values=flat), sizes, head_size)
    return {
        **found,
        "sliding_rotary_base": None if own == base else own,
        "sliding_rotary_scaling": "rotary_scaling" not in found,
    }


def write_by_kind(model: Model) -> Values:
    """`write`, where full and sliding layers turn apart."""
    values, sliding = write(model), model.of_kind(SLIDING)
    own = {"rope_type": "default", "rope_theta": sliding.rotary_base}
    records = zip(_KINDS, (values["rope_parameters"], own), strict=True)
    return {**values, **write_kinds(model), "rope_parameters": dict(records)}


def turns_by_kind(model: Model) -> bool:
    """Whether positions are scaled in full layers alone, and no layer is without."""
    is_scaled = model.rotary_scaling is not None and model.sliding_rotary_scaling
    return NOPE not in model.kinds and not (SLIDING in model.kinds and is_scaled)


def write(model: Model) -> Values:
    """Head size and positions, scaled ones by both names that transformers has had for them."""
    kind, original = model.rotary_scaling, model.rotary_original_positions
    rope: Values = {"rope_type": kind or "default", "rope_theta": model.rotary_base}
    values: Values = {
        "num_key_value_heads": model.key_value,
        "intermediate_size": model.feed_forward,
        "head_dim": model.head_width,
        "rope_theta": model.rotary_base,
        "rope_parameters": rope,
    }
    if model.rotary_fraction != 1.0:
        rope["partial_rotary_factor"] = values["partial_rotary_factor"] = model.rotary_fraction
    if kind is None:
        return values
    slow, fast = model.rotary_slow_turns, model.rotary_fast_turns
    rope["factor"] = model.rotary_factor
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = original
    if kind == "llama3":
        rope |= {"low_freq_factor": slow, "high_freq_factor": fast}
    if kind == "yarn":
        rope |= {"beta_slow": slow, "beta_fast": fast}
        if model.rotary_attention_factor is not None:
            rope["attention_factor"] = model.rotary_attention_factor
    if kind == "dynamic":  # it scales beyond these
        values["max_position_embeddings"] = original
    return {**values, "rope_scaling": rope}


def read_qwen(theirs: TheirConfig, head_size: Any = None) -> Values:
    """Settings of a Qwen, in whose upper layers there may be windows."""
    layers, first = theirs.get(*QWEN_SIZES["layers"]), theirs.get("max_window_layers", 28)
    kinds, has_windows = theirs.get("layer_types"), theirs.get("use_sliding_window")
    if not kinds and all(isinstance(n, int) for n in (layers, first)) and layers < MOST_LAYERS:
        kinds = [SLIDING if has_windows and n >= first else FULL for n in range(layers)]
    else:
        kinds = named_kinds(theirs, layers)
        if SLIDING in kinds and not has_windows:
            theirs.refuse(
                "got sliding_attention among layer_types with use_sliding_window "
                f"{json.dumps(has_windows)}; expected true, or full_attention alone. Correct one."
            )
    return {**read(theirs, QWEN_SIZES, head_size), **read_windows(theirs, QWEN_SIZES, kinds)}


def write_qwen(model: Model) -> Values:
    """Settings of a Qwen."""
    kinds = write_kinds(model)
    return {
        **write(model),
        **kinds,
        "use_sliding_window": model.sliding_window is not None,
        "max_window_layers": model.kinds.count(FULL),
    }


def named_kinds(theirs: TheirConfig, layers: Any) -> "list[str]":
    """The kinds of layers that their configuration lists; none where it does not."""
    kinds = theirs.get("layer_types") or []
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        theirs.expect("layer_types", kind, tuple(_KINDS))
    if kinds and len(kinds) != layers:
        theirs.refuse(
            f"got {len(kinds)} layer_types for {json.dumps(layers)} layers; expected one a layer. "
            "Correct the list."
        )
    return [_KINDS[kind] for kind in kinds]


def read_windows(
    theirs: TheirConfig,
    sizes: "dict[str, tuple[str, Any]]",
    kinds: "list[str]",
    by_kind: bool = False,
) -> Values:
    """The pattern of layers, and the window of the sliding ones. One that holds a whole text is
    none, unless sliding layers are others than full ones in more than that.
    """
    window, positions = theirs.get("sliding_window", WINDOW), theirs.get(*sizes["sequence_length"])
    is_whole = isinstance(window, int) and isinstance(positions, int) and window >= positions
    is_whole = is_whole and not by_kind
    if SLIDING not in kinds or window is None or is_whole:
        return {}
    return {"layer_pattern": pattern_of(kinds), "window": window}


def pattern_of(kinds: "list[str]") -> "list[str]":
    """The shortest pattern of the kinds of all layers; none where all are full."""
    count = len(kinds)
    period = next(p for p in range(1, count + 1) if kinds == (kinds[:p] * count)[:count])
    return [] if {*kinds} == {FULL} else kinds[:period]


def write_kinds(model: Model) -> Values:
    """The kind of each layer, and the window."""
    names = {ours: kind for kind, ours in _KINDS.items()}
    return {
        "layer_types": [names[kind] for kind in model.kinds],
        "sliding_window": model.sliding_window,
    }
