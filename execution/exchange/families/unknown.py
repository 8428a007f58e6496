"""Architectures that no family here has, by the settings of a `config.json` that say so."""

from popxl_gpt.execution.exchange.families.family import TheirConfig
from popxl_gpt.utils.files.bounded import shown

EXPERTS = "a mixture of experts", "one feed-forward layer in each block"
LATENT = "latent attention", "keys and values that are projected from activations alone"
LINEAR = "linear attention", "softmax attention in each block"
STATES = "state spaces", "softmax attention in each block"
CROSS = "cross attention", "decoders alone, whose tokens see those before them"
VISION = "a vision tower", "text alone"
SOUND = "an audio tower", "text alone"
UNKNOWN = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS),
    "moe_num_experts": EXPERTS,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), LATENT),
    **dict.fromkeys(("linear_attn_config", "linear_conv_kernel_dim"), LINEAR),
    "mamba_d_state": STATES,
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention"), CROSS),
    "cross_attention_layers": CROSS,
    "vision_config": VISION,
    "audio_config": SOUND,
}
"""What a setting says, where it is more than none, and what is known in place of it."""
LAYERS = {"linear_attention": LINEAR, "mamba": STATES, "mamba2": STATES}
"""The same of kinds of layers that `layer_types` may name."""


def refuse_unknown(theirs: TheirConfig) -> None:
    """Refuse a model with an architecture that is not known, whatever its type."""
    kinds = theirs.get("layer_types")
    found = [(name, theirs.get(name), told) for name, told in UNKNOWN.items()]
    if isinstance(kinds, list):
        found += [("layer_types", kind, told) for kind, told in LAYERS.items() if kind in kinds]
    for name, value, (what, known) in found:
        if value:
            theirs.refuse(
                f"got {name} {shown(value)}, which is {what}; expected {known}, as models have "
                "that are known here. Convert a model that has it."
            )
