"""Settings: the GPT that is trained."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from popxl_gpt.config.bounds import (
    Count,
    CountOrZero,
    Fraction,
    Largest,
    Needs,
    ObjectCount,
    Positive,
    PositiveOrZero,
    Range,
    TensorCount,
)
from popxl_gpt.config.rules import multiple_of, remainder, rule

ARCHITECTURE = (
    "layers", "hidden_size", "heads", "vocabulary_size", "norm", "position_embedding",
    "rotary_base", "rotary_scaling", "rotary_factor", "rotary_original_positions",
    "rotary_slow_turns", "rotary_fast_turns", "rotary_attention_factor", "token_shift", "qk_norm",
    "bigram_rows", "value_embeddings", "activation", "biases", "tied_head", "logit_softcap",
    "convolution_size", "norm_placement", "zero_centered_gains", "qk_norm_over", "rotary_fraction",
    "embedding_scale", "parallel_branches", "sliding_rotary_base", "sliding_rotary_scaling",
    "score_softcap",
)  # fmt: skip
"""Settings of the model that weights are for; beside them those of `BY_DEFAULT`."""
BY_DEFAULT = {
    "key_value_heads": "key_value", "feed_forward_size": "feed_forward",
    "head_size": "head_width", "qkv_biases": "has_qkv_biases", "layer_pattern": "kinds",
    "attention_scale": "score_scale", "window": "sliding_window",
}  # fmt: skip
"""Settings that weights are for and that may be none, and what of a model tells them then."""


def turning(head_size: int, fraction: float) -> int:
    """Features of a head that turn, where positions are rotary."""
    return int(head_size * fraction)


def _pairs_problem(head_size: int, fraction: float) -> str | None:
    """The problem of a share of a head's features that is no number of pairs."""
    features = turning(head_size, fraction)
    if head_size == 0 or (features and features % 2 == 0):
        return None
    fitting = min(1, (max(2, features - 1) + 0.5) / head_size)
    return (
        f"rotary_fraction: got {fraction:g}, which is {features} of a head's {head_size} features; "
        f"expected an even number, 2 or more, for they turn in pairs. Use {fitting:.3g}."
    )


FULL, SLIDING, NOPE = KINDS = ("full", "sliding", "nope")
"""Kinds of layers."""
_SLIDING = Needs(
    "layer_pattern", "--layer_pattern sliding sliding sliding full", lambda value: SLIDING in value
)
_ROTARY = Needs(
    "position_embedding", "--position_embedding rotary", lambda value: value == "rotary"
)
_SCALED = Needs("rotary_scaling", "--rotary_scaling yarn", lambda value: value is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The GPT that is trained."""

    layers: ObjectCount = 12
    """Decoder blocks."""
    hidden_size: TensorCount = 768
    """Width of the activations between blocks; a multiple of heads where head_size is none."""
    heads: TensorCount = 12
    """Attention heads per block."""
    head_size: TensorCount | None = None
    """Features of a head; none: hidden_size / heads."""
    key_value_heads: Count | None = None
    """Heads of keys and values per block, each of which serves equally many heads of queries
    (grouped queries); none: as many as heads.
    """
    sequence_length: TensorCount = 1024
    """Tokens per training sequence."""
    vocabulary_size: TensorCount = 50257
    """Token ids; padded to a multiple of tensor_parallel_1 inside the program."""
    layer_pattern: tuple[str, ...] = ()
    """Kinds of the decoder's layers, again and again from the first one on: full, whose tokens see
    all before them; sliding, whose tokens see those in a window; nope, full without positions that
    are told by turning. None: all are full.
    """
    window: Annotated[TensorCount | None, _SLIDING] = None
    """Tokens that each token of a sliding layer sees, itself among them."""
    max_positions: TensorCount | None = None
    """Tokens of a text that the model sees at most, which is the rows of a learned position
    embedding; none: sequence_length.
    """
    feed_forward_size: TensorCount | None = None
    """Width inside the feed-forward layer; none: 4 * hidden_size."""
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    """How activations are normalised; RMS norms subtract no mean, and have no bias."""
    norm_placement: Literal["before", "after", "around"] = "before"
    """The place of a block's norms: before attention and before the feed-forward layer, after each,
    of what it adds, or both.
    """
    zero_centered_gains: bool = False
    """Gains of RMS norms are one more than their weights."""
    parallel_branches: bool = False
    """Give the feed-forward layer what attention gets, in place of what has attention's added."""
    embedding_scale: Positive = 1.0
    """What the vectors of words are multiplied by, rounded to the precision; a tied head uses them
    as they are.
    """
    position_embedding: Literal["learned", "rotary"] = "learned"
    """Positions are told by vectors that are added to words, or by turning queries and keys."""
    rotary_base: Annotated[Positive, _ROTARY] = 10000.0
    """Features i and i + D/2 of a head of size D turn by rotary_base ** (-2i / D) radians per
    token.
    """
    rotary_fraction: Annotated[float, Range(above=0, high=1), _ROTARY] = 1.0
    """Share of a head's features that turn, as a head of so many would; those after them stay."""
    rotary_scaling: Annotated[Literal["linear", "dynamic", "llama3", "yarn"] | None, _ROTARY] = None
    """Turn features more slowly, for texts longer than a model was first trained on: linear, all of
    them; dynamic, by a larger rotary_base where the program holds more positions than those; llama3
    and yarn, those that turn few times; none: as rotary_base says.
    """
    rotary_factor: Annotated[Positive, _SCALED] = 1.0
    """What the slowest features turn more slowly by."""
    rotary_original_positions: Annotated[TensorCount | None, _SCALED] = None
    """Tokens of a text that the model was first trained on; linear scaling needs none."""
    rotary_slow_turns: Annotated[Positive, _SCALED] = 1.0
    """Features that turn fewer times in rotary_original_positions are slowed down by all of
    rotary_factor: low_freq_factor of llama3, beta_slow of yarn.
    """
    rotary_fast_turns: Annotated[Positive, _SCALED] = 32.0
    """Features that turn more times are not slowed down: high_freq_factor of llama3, which is 4 in
    its models, beta_fast of yarn.
    """
    rotary_attention_factor: Annotated[PositiveOrZero | None, _SCALED] = None
    """What yarn multiplies queries and keys by; none: 0.1 * ln(rotary_factor) + 1."""
    sliding_rotary_base: Annotated[Positive | None, _SLIDING] = None
    """The rotary_base of sliding layers; none: that of the others."""
    sliding_rotary_scaling: Annotated[bool, _SLIDING] = True
    """Scale positions in sliding layers, too, where rotary_scaling does it in the others."""
    token_shift: bool = False
    """Add to the vector of each word that of the word before it, times a factor per channel that is
    trained.
    """
    bigram_rows: Annotated[CountOrZero, Largest(2**30)] = 0
    """Rows of a table of pairs of words: to the vector of each word that of the pair which it is
    with the word before is added. More pairs than rows share them, by a fixed hash; 0: no table.
    """
    convolution_size: Count = 1
    """Tokens that short convolutions see, the token itself among them: in front of attention and
    feed-forward layers, and in queries, keys and values, they add those before it, each times a
    factor per channel that is trained; 1: none.
    """
    qk_norm: bool = False
    """Normalise queries and keys of each head by an RMS norm, before they are turned."""
    qk_norm_over: Annotated[Literal["head", "all"], Needs("qk_norm", "--qk_norm", bool)] = "head"
    """The features that a norm of qk_norm is over: those of each head, by one gain for all heads,
    or those of all heads together.
    """
    value_embeddings: bool = False
    """Add to the values of each block's attention an embedding of the words, from a table of its
    own.
    """
    activation: Literal["gelu", "gelu_exact", "relu2", "swiglu", "geglu"] = "gelu"
    """Function between the feed-forward layer's projections: GELU in its tanh form, or by erf;
    squared ReLU; or the product of one half of the first projection and the swish, or the GELU in
    its tanh form, of the other, which makes it twice as wide.
    """
    biases: bool = True
    """Add biases in linear layers and layer norms."""
    qkv_biases: bool | None = None
    """Add biases to queries, keys and values; none: as biases says."""
    tied_head: bool = True
    """Use the word embedding for the logits as well; false: the head has a matrix of its own."""
    logit_softcap: PositiveOrZero = 0.0
    """Bound c of the logits, which become c * tanh(logit / c); 0: none."""
    attention_scale: Positive | None = None
    """What attention scores, products of queries and keys, are multiplied by; none: 1 / sqrt(size
    of a head).
    """
    score_softcap: PositiveOrZero = 0.0
    """Bound c of attention scores, which become c * tanh(score / c); 0: none."""
    dropout: Fraction = 0.1
    """Probability that a unit is dropped, for embeddings, attention probabilities and residual
    branches.
    """
    attention_serialisation: TensorCount = 1
    """Pieces the queries are cut into: less of the score matrix is held at once, and later keys
    cost nothing.
    """
    lora_rank: CountOrZero = 0
    """Width of the low-rank adapters of linear layers: they are trained, and all else is frozen; 0:
    no adapters, and all is trained.
    """
    lora_alpha: Annotated[Positive, Needs("lora_rank", "--lora_rank 8", bool)] = 16.0
    """What adapters add is times this over lora_rank."""
    document_attention: bool = False
    """Let tokens attend to their own document only, where a sequence holds several; positions count
    from each document's beginning.
    """
    end_of_text: CountOrZero = 0
    """Token that ends a document, for document_attention; 0 in tokenizers that data/prepare.py
    trains.
    """
    precision: Literal["float32", "float16", "bfloat16"] = "float32"
    """Data type of weights and activations; sums and gradient accumulators are float32."""
    products: Literal["precision", "fp8"] = "precision"
    """What linear layers of decoder blocks multiply: numbers of the precision; or fp8, numbers of 8
    bits, each tensor with a scale of its own, in all blocks but the first and the last one. Weights
    have rows of 8 bits then, beside those that are trained.
    """
    initial_std: Positive = 0.02
    """Standard deviation of fresh weights; projections into the residual stream use it divided by
    sqrt(2 * layers).
    """
    initialisation: Literal["fixed", "width"] = "fixed"
    """What initial_std is for: fixed, all weights; width, embeddings and head, while matrices of
    decoder blocks have 1/sqrt(inputs) in its place, so that a rate found for a narrow model serves
    a wide one better.
    """
    zero_init_residual: bool = False
    """Start projections into the residual stream at zero, so that each decoder block starts as the
    identity.
    """
    layer_norm_eps: Positive = 1e-5
    """Added to the variance by layer norms, to the mean square by RMS norms."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer."""
        pattern = self.layer_pattern or (FULL,)
        return tuple(pattern[n % len(pattern)] for n in range(self.layers))

    def of_kind(self, kind: str) -> "Model":
        """The model whose layers are all of one kind, and multiply numbers of the precision."""
        wide = self if self.products == "precision" else replace(self, products="precision")
        if {*self.kinds} == {FULL}:
            return replace(wide, window=None)
        pattern = (kind,)
        if kind != SLIDING:
            return replace(wide, layer_pattern=pattern, window=None)
        base = self.sliding_rotary_base
        return replace(
            wide,
            layer_pattern=pattern,
            rotary_base=self.rotary_base if base is None else base,
            rotary_scaling=self.rotary_scaling if self.sliding_rotary_scaling else None,
        )

    @property
    def blocks(self) -> "tuple[Model, ...]":
        """The model of each layer in training: of its kind, with the products that it has."""
        wide = {kind: self.of_kind(kind) for kind in {*self.kinds}}
        inner = {kind: replace(model, products=self.products) for kind, model in wide.items()}
        last = self.layers - 1
        return tuple((inner if 0 < n < last else wide)[k] for n, k in enumerate(self.kinds))

    @property
    def sliding_window(self) -> int | None:
        """Tokens that each token of a sliding layer sees; none where no layer is sliding."""
        return self.window if SLIDING in self.kinds else None

    @property
    def positions(self) -> int:
        """Tokens of a text that the model sees at most."""
        return self.sequence_length if self.max_positions is None else self.max_positions

    @property
    def feed_forward(self) -> int:
        """Width inside the feed-forward layer."""
        return 4 * self.hidden_size if self.feed_forward_size is None else self.feed_forward_size

    @property
    def head_width(self) -> int:
        """Features of one attention head."""
        return self.hidden_size // self.heads if self.head_size is None else self.head_size

    @property
    def rotary_size(self) -> int:
        """Features of one attention head that turn, where positions are rotary."""
        return turning(self.head_width, self.rotary_fraction)

    @property
    def has_gate(self) -> bool:
        """Whether the first projection of feed-forward layers is a gate and values."""
        return self.activation in ("swiglu", "geglu")

    @property
    def has_norms_before(self) -> bool:
        """Whether attention and feed-forward layers get what is normal."""
        return self.norm_placement != "after"

    @property
    def has_norms_after(self) -> bool:
        """Whether what attention and feed-forward layers add is made normal."""
        return self.norm_placement != "before"

    @property
    def attention_width(self) -> int:
        """Features of all heads, which is what the output projection of attention takes."""
        return self.heads * self.head_width

    @property
    def has_own_head_size(self) -> bool:
        """Whether all heads together are of another width than the activations between blocks."""
        return self.attention_width != self.hidden_size

    @property
    def has_qkv_biases(self) -> bool:
        """Whether biases are added to queries, keys and values."""
        return self.biases if self.qkv_biases is None else self.qkv_biases

    @property
    def score_scale(self) -> float:
        """What attention scores are multiplied by."""
        scale = self.attention_scale
        return 1 / math.sqrt(self.head_width) if scale is None else scale

    @property
    def key_value(self) -> int:
        """Heads of keys and values per block."""
        return self.heads if self.key_value_heads is None else self.key_value_heads

    @property
    def has_word_before(self) -> bool:
        """Whether the embedding of a word looks at the word before."""
        return self.token_shift or self.bigram_rows > 0

    @property
    def has_convolutions(self) -> bool:
        """Whether there are short convolutions."""
        return self.convolution_size > 1

    @property
    def turns(self) -> bool:
        """Whether the layers of a model of one kind turn queries and keys."""
        (kind,) = {*self.kinds}
        return self.position_embedding == "rotary" and kind != NOPE

    @property
    def has_position_table(self) -> bool:
        """Whether positions are learned vectors."""
        return self.position_embedding == "learned"


RULES = (
    rule(
        lambda layer_pattern: (
            not {*layer_pattern} <= {*KINDS}
            and f"layer_pattern: got {' '.join(layer_pattern)}; expected words out of "
            f"{', '.join(KINDS)}, one a layer. Change it."
        )
    ),
    rule(
        lambda layer_pattern, window: (
            SLIDING in layer_pattern
            and window is None
            and "window: got none with sliding layers in layer_pattern; expected the tokens that a "
            "token of these sees. Give it, as --window 1024."
        )
    ),
    rule(
        lambda layer_pattern, position_embedding: (
            NOPE in layer_pattern
            and position_embedding != "rotary"
            and f"layer_pattern: got nope with position_embedding {position_embedding}; expected "
            "rotary, which such layers leave out. Use --position_embedding rotary, or full."
        )
    ),
    rule(
        lambda hidden_size, heads, *, head_size: (
            head_size is None and remainder("hidden_size", hidden_size, "heads", heads)
        )
    ),
    rule(
        lambda products, layers: (
            products == "fp8"
            and layers < 3
            and f"products: got fp8 with layers {layers}; expected at least 3, for the first and "
            "the last block multiply numbers of the precision. Use more layers, or --products "
            "precision."
        )
    ),
    multiple_of("heads", "tensor_parallel_1"),
    multiple_of("heads", "key_value_heads"),
    rule(
        lambda key_value_heads, tensor_parallel_1, *, heads: (
            heads % (key_value_heads or 1) == 0
            and remainder(
                "key_value_heads", key_value_heads, "tensor_parallel_1", tensor_parallel_1
            )
        )
    ),
    rule(
        lambda position_embedding, hidden_size, heads, *, head_size: (
            position_embedding == "rotary"
            and head_size is None
            and hidden_size // heads % 2
            and "position_embedding: got rotary with heads of hidden_size / heads = "
            f"{hidden_size // heads} features; expected an even number, for they turn in pairs. "
            "Change hidden_size or heads."
        )
    ),
    rule(
        lambda head_size, position_embedding: (
            position_embedding == "rotary"
            and (head_size or 0) % 2
            and f"head_size: got {head_size} with position_embedding rotary; expected an even "
            f"number, for features turn in pairs. Use {head_size + 1}."
        )
    ),
    rule(
        lambda zero_centered_gains, norm: (
            zero_centered_gains
            and norm != "rms_norm"
            and f"zero_centered_gains: got true with norm {norm}; expected norm rms_norm, whose "
            "gains may be one more than their weights. Use --norm rms_norm."
        )
    ),
    rule(
        lambda rotary_fraction, hidden_size, heads, head_size: (
            rotary_fraction < 1
            and _pairs_problem(head_size or hidden_size // heads, rotary_fraction)
        )
    ),
    rule(
        lambda rotary_scaling, rotary_original_positions: (
            rotary_scaling in ("dynamic", "llama3", "yarn")
            and rotary_original_positions is None
            and f"rotary_original_positions: got none with rotary_scaling {rotary_scaling}; "
            "expected the tokens of a text that the model was first trained on. Give them."
        )
    ),
    rule(
        lambda rotary_fast_turns, rotary_slow_turns, *, rotary_scaling: (
            rotary_scaling in ("llama3", "yarn")
            and rotary_fast_turns <= rotary_slow_turns
            and f"rotary_fast_turns: got {rotary_fast_turns:g}; expected more than "
            f"rotary_slow_turns = {rotary_slow_turns:g}. Raise it."
        )
    ),
    rule(
        lambda rotary_base, *, rotary_scaling: (
            rotary_scaling == "yarn"
            and rotary_base <= 1
            and f"rotary_base: got {rotary_base:g} with rotary_scaling yarn; expected more than 1, "
            "as 10000 is."
        )
    ),
    rule(
        lambda sliding_rotary_base, *, rotary_scaling, sliding_rotary_scaling: (
            sliding_rotary_base is not None
            and rotary_scaling == "yarn"
            and sliding_rotary_scaling
            and sliding_rotary_base <= 1
            and f"sliding_rotary_base: got {sliding_rotary_base:g} with rotary_scaling yarn; "
            "expected more than 1, as 10000 is. Raise it, or use --sliding_rotary_scaling false."
        )
    ),
    rule(
        lambda rotary_scaling, hidden_size, heads, head_size, *, rotary_fraction: (
            rotary_scaling == "dynamic"
            and turning(head_size or hidden_size // heads, rotary_fraction) <= 2
            and "rotary_scaling: got dynamic with heads of 2 features; expected more, for their "
            "one pair turns by 1 radian per token, whatever rotary_base is. Use linear."
        )
    ),
    multiple_of("hidden_size", "tensor_parallel_2"),
    rule(
        lambda feed_forward_size, tensor_parallel_1, hidden_size, *, head_size: remainder(
            "feed_forward_size",
            feed_forward_size or (head_size and 4 * hidden_size),  # else heads divide it
            "tensor_parallel_1",
            tensor_parallel_1,
        )
    ),
    multiple_of("sequence_length", "attention_serialisation"),
    rule(
        lambda sequence_length, max_positions: (
            max_positions
            and sequence_length > max_positions
            and f"sequence_length: got {sequence_length}; expected at most max_positions = "
            f"{max_positions}. Shorten the sequence or raise max_positions."
        )
    ),
    rule(
        lambda lora_rank, hidden_size: (
            lora_rank > hidden_size
            and f"lora_rank: got {lora_rank}; expected at most hidden_size = {hidden_size}, for a "
            "wider adapter is no smaller than the layer. Use 8 or 16."
        )
    ),
    rule(
        lambda lora_rank, optimizer: (
            lora_rank
            and optimizer == "muon"
            and f"optimizer: got muon with lora_rank = {lora_rank}; expected adamw, which updates "
            "adapters. Use --optimizer adamw."
        )
    ),
    rule(
        lambda end_of_text, vocabulary_size: (
            end_of_text >= vocabulary_size
            and f"end_of_text: got {end_of_text}; expected a token below vocabulary_size = "
            f"{vocabulary_size}. Use the end_of_text of the data's dataset.json."
        )
    ),
)
