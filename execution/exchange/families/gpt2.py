"""GPT-2, with GELU in either form."""

from popxl_gpt.config.schema import Model
from popxl_gpt.execution.exchange.families.family import OUTSIDE, Family, TheirConfig, Values

TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Names of the tanh form of GELU."""
EXACT_GELU = ("gelu", "gelu_python")
"""Names of GELU by erf."""
GELUS = ("gelu", "gelu_exact")
"""Our names of both."""
DROPPED = ("resid_pdrop", "attn_pdrop", "embd_pdrop")
"""Their three probabilities that a unit is dropped, which are one here."""


def gelu_in(theirs: TheirConfig, name: str, default: str) -> str:
    """Our name of a form of GELU."""
    found = theirs.get(name, default)
    theirs.expect(name, found, (*TANH_GELU, *EXACT_GELU))
    return "gelu" if found in TANH_GELU else "gelu_exact"


def gelu_of(model: Model) -> str:
    """Their name of a form of GELU."""
    return (TANH_GELU if model.activation == "gelu" else EXACT_GELU)[0]


def _read(theirs: TheirConfig) -> Values:
    """Our settings, of the probabilities that a unit is dropped that of residual branches."""
    activation = gelu_in(theirs, "activation_function", TANH_GELU[0])
    return {"activation": activation, "dropout": theirs.get(DROPPED[0], 0.1)}


def _write(model: Model) -> Values:
    dropped = dict.fromkeys(DROPPED, model.dropout)
    return {"activation_function": gelu_of(model), **dropped}


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    settings={"has_own_head_size": False},
    modules={
        "embedding.word": ("wte",),
        "embedding.position": ("wpe",),
        "decoder.#.attention_norm": ("h.#.ln_1",),
        "decoder.#.attention.qkv": ("h.#.attn.c_attn",),
        "decoder.#.attention.output": ("h.#.attn.c_proj",),
        "decoder.#.feed_forward_norm": ("h.#.ln_2",),
        "decoder.#.feed_forward.up": ("h.#.mlp.c_fc",),
        "decoder.#.feed_forward.down": ("h.#.mlp.c_proj",),
        "head.norm": ("ln_f",),
        "head.output": (OUTSIDE,),
    },
    is_transposed=False,
    sizes={
        "vocabulary_size": ("vocab_size", 50257),
        "sequence_length": ("n_positions", 1024),
        "hidden_size": ("n_embd", 768),
        "layers": ("n_layer", 12),
        "heads": ("n_head", 12),
        "feed_forward_size": ("n_inner", None),
        "layer_norm_eps": ("layer_norm_epsilon", 1e-5),
        "tied_head": ("tie_word_embeddings", True),
    },
    fixed={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    read=_read,
    write=_write,
    varied=("activation",),
    allowed={"activation": GELUS},
    buffers=("h.#.attn.bias", "h.#.attn.masked_bias"),
)
