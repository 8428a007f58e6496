"""SmolLM3: a Llama some of whose layers have no positions."""

from popxl_gpt.config.model import FULL, NOPE, SLIDING
from popxl_gpt.config.schema import Model
from popxl_gpt.execution.exchange.families import rotary_decoder as shared
from popxl_gpt.execution.exchange.families.family import Family, TheirConfig, Values

SIZES = {
    **shared.SIZES,
    "vocabulary_size": ("vocab_size", 128256),
    "sequence_length": ("max_position_embeddings", 32768),
    "hidden_size": ("hidden_size", 2048),
    "layers": ("num_hidden_layers", 36),
    "heads": ("num_attention_heads", 16),
    "key_value_heads": ("num_key_value_heads", 4),
    "tied_head": ("tie_word_embeddings", True),
}
BASE = 2000000.0


def _read(theirs: TheirConfig) -> Values:
    turned, every = theirs.get("no_rope_layers"), theirs.get("no_rope_layer_interval", 4)
    if turned is None:
        theirs.expect("no_rope_layer_interval", every, tuple(range(1, 65)))
        turned = [1] * (every - 1) + [0]
    if not isinstance(turned, list) or not {*map(repr, turned)} <= {"0", "1"} or not turned:
        theirs.refuse("got no_rope_layers that are none; expected a list of 0 and 1, one a layer.")
    kinds = [FULL if is_turned else NOPE for is_turned in turned]
    default = {"rope_theta": BASE, **theirs.values}
    found = shared.read(TheirConfig(theirs.file, default), SIZES)
    return {**found, "layer_pattern": shared.pattern_of(kinds)}


def _write(model: Model) -> Values:
    turned = [int(kind == FULL) for kind in model.kinds]
    kinds = ["full_attention"] * model.layers
    return {**shared.write(model), "no_rope_layers": turned, "layer_types": kinds}


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    prefix="model.",
    settings=shared.SETTINGS,
    modules=shared.MODULES,
    is_transposed=True,
    sizes=SIZES,
    fixed={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "use_sliding_window": (False,),
    },
    read=_read,
    write=_write,
    varied=(*shared.VARIED, "layer_pattern"),
    is_loaded=lambda model: SLIDING not in model.kinds and model.hidden_size % model.heads == 0,
    buffers=shared.BUFFERS,
)
