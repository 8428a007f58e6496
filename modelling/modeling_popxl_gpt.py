"""A GPT that none of transformers' own families is, for transformers: whoever exports such a model
puts this file beside its weights, and `AutoModelForCausalLM.from_pretrained(folder,
trust_remote_code=True)` runs it.

Plain PyTorch, which knows nothing of the rest of the repository. No keys and values are kept: for
each new token the whole text is computed. Nothing is dropped.
"""

# B batch, S sequence, H hidden size, A heads, K heads of keys and values, D head size, V
# vocabulary.
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutput


class PopxlGPTConfig(PretrainedConfig):
    """Sizes and choices: what transformers has no name for has the name of the setting that it was
    trained with.
    """

    model_type = "popxl_gpt"

    vocab_size: int = 50257
    max_position_embeddings: int = 1024
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int | None = None
    intermediate_size: int = 3072
    tie_word_embeddings: bool = True
    norm: str = "layer_norm"
    norm_eps: float = 1e-5
    position_embedding: str = "learned"
    rotary_base: float = 10000.0
    rotary_scaling: str | None = None
    rotary_factor: float = 1.0
    rotary_original_positions: int | None = None
    rotary_slow_turns: float = 1.0
    rotary_fast_turns: float = 32.0
    rotary_attention_factor: float | None = None
    token_shift: bool = False
    bigram_rows: int = 0
    convolution_size: int = 1
    qk_norm: bool = False
    value_embeddings: bool = False
    activation: str = "gelu"
    biases: bool = True
    qkv_biases: bool | None = None
    logit_softcap: float = 0.0
    initializer_range: float = 0.02

    @property
    def head_size(self) -> int:
        """Features of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


class Beside(NamedTuple):
    """What every block gets beside its input."""

    words: Tensor
    """The words, int [B, S]."""
    positions: Tensor
    """The positions of the words in their texts, int [B, S]."""
    mask: Tensor
    """Whether a word sees another one, bool [B, 1, S, S]."""
    angles: tuple[Tensor, Tensor] | None
    """Cosines and sines of rotary positions, [B, S, 1, D/2] each."""


class Weight(nn.Module):
    """A tensor, and a bias for the last axis."""

    def __init__(self, *shape: int, has_bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[-1])) if has_bias else None


class Linear(Weight):
    """Weights lie [in, out]."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        y = x @ self.weight
        return y if self.bias is None else y + self.bias


class RMSNorm(Weight):
    """x over the root of its mean square, along the last axis."""

    def __init__(self, size: int, eps: float):
        super().__init__(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)


def norm(config: PopxlGPTConfig) -> nn.Module:
    """The norm of the activations between blocks."""
    if config.norm == "rms_norm":
        return RMSNorm(config.hidden_size, config.norm_eps)
    return nn.LayerNorm(config.hidden_size, config.norm_eps, bias=config.biases)


class ShortConvolution(Weight):
    """Adds to each token those shortly before it, each times a factor per channel; those of row n
    are of the token n + 1 before.
    """

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """[B, S, features], int [B, S] -> [B, S, features]."""
        y = x
        for distance, factors in enumerate(self.weight[: x.shape[1] - 1], 1):
            before = F.pad(x, (0, 0, distance, 0))[:, : x.shape[1]]
            y = y + before * factors * (positions >= distance).unsqueeze(-1)
        return y


class Nothing(nn.Module):
    """What stands in place of a short convolution."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x itself."""
        return x


def convolution(config: PopxlGPTConfig, features: int) -> nn.Module:
    """A short convolution, where the model has them."""
    size = config.convolution_size
    return ShortConvolution(size - 1, features) if size > 1 else Nothing()


class ValueEmbedding(Weight):
    """Values, and vectors of the words themselves, each times a factor."""

    def __init__(self, words: int, width: int):
        super().__init__(words, width)
        self.mix = nn.Parameter(torch.empty(2))

    def forward(self, values: Tensor, words: Tensor) -> Tensor:
        """[B, S, K*D], int [B, S] -> [B, S, K*D]."""
        return values * self.mix[0] + self.weight[words] * self.mix[1]


class TokenShift(Weight):
    """Adds to each token the one before it, times a factor per channel."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """[B, S, features], int [B, S] -> [B, S, features]."""
        before = F.pad(x, (0, 0, 1, 0))[:, :-1] * (positions > 0).unsqueeze(-1)
        return x + before * self.weight


class Bigram(Weight):
    """Vectors of pairs of words, some of which share one: of a pair (word + offset of the word
    before) modulo the number of rows, where offsets are multiples of the golden ratio of that.
    """

    def forward(self, words: Tensor, positions: Tensor) -> Tensor:
        """int [B, S], int [B, S] -> [B, S, H]."""
        rows = len(self.weight)
        step = round(rows * (math.sqrt(5) - 1) / 2)
        before = (F.pad(words, (1, 0))[:, :-1] + 1) * (positions > 0)  # 0: none
        return self.weight[(words + before * step) % rows]


class Embedding(nn.Module):
    """Vectors of words, of the words before them, of the pairs of both and of positions."""

    def __init__(self, config: PopxlGPTConfig):
        super().__init__()
        hidden = config.hidden_size
        self.word = nn.Embedding(config.vocab_size, hidden)
        self.shift = TokenShift(hidden) if config.token_shift else None
        self.bigram = Bigram(config.bigram_rows, hidden) if config.bigram_rows else None
        has_table = config.position_embedding == "learned"
        self.position = nn.Embedding(config.max_position_embeddings, hidden) if has_table else None

    def forward(self, words: Tensor, positions: Tensor) -> Tensor:
        """int [B, S], int [B, S] -> [B, S, H]."""
        x = self.word(words)
        if self.shift is not None:
            x = self.shift(x, positions)
        if self.bigram is not None:
            x = x + self.bigram(words, positions)
        return x if self.position is None else x + self.position(positions)


class Attention(nn.Module):
    """Causal attention; features of queries, keys and values stand side by side."""

    def __init__(self, config: PopxlGPTConfig):
        super().__init__()
        self.config = config
        self.queries = config.num_attention_heads * config.head_size
        self.keys = config.num_key_value_heads * config.head_size
        width = self.queries + 2 * self.keys
        has_bias = config.biases if config.qkv_biases is None else config.qkv_biases
        self.qkv = Linear(config.hidden_size, width, has_bias=has_bias)
        self.output = Linear(self.queries, config.hidden_size, has_bias=config.biases)
        self.convolution = convolution(config, width)
        if config.qk_norm:
            self.query_norm = RMSNorm(config.head_size, config.norm_eps)
            self.key_norm = RMSNorm(config.head_size, config.norm_eps)
        if config.value_embeddings:
            self.value_embedding = ValueEmbedding(config.vocab_size, self.keys)

    def forward(self, x: Tensor, beside: Beside) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        config, (batch, sequence, _) = self.config, x.shape
        qkv = self.convolution(self.qkv(x), beside.positions)
        q, k, v = qkv.split([self.queries, self.keys, self.keys], dim=-1)
        if config.value_embeddings:
            v = self.value_embedding(v, beside.words)
        q, k, v = (t.view(batch, sequence, -1, config.head_size) for t in (q, k, v))
        if config.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        if beside.angles is not None:
            q, k = (rotated(t, *beside.angles) for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, A, S, D], twice [B, K, S, D]
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=beside.mask)
        return self.output(y.transpose(1, 2).reshape(batch, sequence, -1))


def angles_of(config: PopxlGPTConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines by which features of heads turn: features i and i + D/2 by
    rotary_base ** (-2i / D) radians per position, int [B, S] -> [B, S, 1, D/2] each.

    Source: Su et al. 2021, arXiv:2104.09864, section 3.2.2.
    """
    length = positions.shape[1]
    table = torch.outer(torch.arange(length, dtype=torch.float64), speeds_of(config, length))
    factor = config.rotary_attention_factor
    if config.rotary_scaling != "yarn":
        factor = 1.0
    elif factor is None:
        factor = 0.1 * math.log(max(config.rotary_factor, 1.0)) + 1.0
    tables = (table.cos() * factor, table.sin() * factor)
    cos, sin = (t.float().to(positions.device)[positions] for t in tables)
    return cos.unsqueeze(2), sin.unsqueeze(2)


def speeds_of(config: PopxlGPTConfig, length: int) -> Tensor:
    """Radians that pairs of features turn by per position, float64 [D/2], in texts of a length.

    Sources: Chen et al. 2023, arXiv:2306.15595 (linear); Peng et al. 2023, arXiv:2309.00071
    (dynamic, yarn); Llama Team 2024, "Llama 3.1", `apply_scaling` (llama3).
    """
    kind, size, base = config.rotary_scaling, config.head_size, config.rotary_base
    factor, original = config.rotary_factor, config.rotary_original_positions or length
    slow, fast = config.rotary_slow_turns, config.rotary_fast_turns
    if kind == "dynamic":
        longer = max(length, original) / original
        base *= (factor * longer - (factor - 1)) ** (size / (size - 2))
    plain = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    kept = torch.ones(size // 2, dtype=torch.float64)  # what each keeps of its speed
    if kind == "linear":
        kept = 0 * kept
    elif kind == "llama3":
        kept = ((original * plain / (2 * math.pi) - slow) / (fast - slow)).clamp(0, 1)
    elif kind == "yarn":
        pairs = [
            size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (fast, slow)
        ]
        first = max(math.floor(pairs[0]), 0)
        last: float = min(math.ceil(pairs[1]), size - 1)
        if first == last:
            last += 0.001
        numbers = torch.arange(size // 2, dtype=torch.float64)
        kept = 1 - ((numbers - first) / (last - first)).clamp(0, 1)
    return plain * (kept + (1 - kept) / factor)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys, [B, S, A, D], turned."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class FeedForward(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, config: PopxlGPTConfig):
        super().__init__()
        self.activation, wide = config.activation, config.intermediate_size
        first = 2 * wide if config.activation == "swiglu" else wide
        self.up = Linear(config.hidden_size, first, has_bias=config.biases)
        self.down = Linear(wide, config.hidden_size, has_bias=config.biases)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        y = self.up(x)
        if self.activation == "swiglu":
            gate, values = y.chunk(2, dim=-1)
            return self.down(F.silu(gate) * values)
        gelu = self.activation == "gelu"
        return self.down(F.gelu(y, approximate="tanh") if gelu else F.relu(y).square())


class Block(GradientCheckpointingLayer):
    """Attention and feed-forward, each behind a norm and added to its input."""

    def __init__(self, config: PopxlGPTConfig):
        super().__init__()
        self.attention_norm = norm(config)
        self.attention_convolution = convolution(config, config.hidden_size)
        self.attention = Attention(config)
        self.feed_forward_norm = norm(config)
        self.feed_forward_convolution = convolution(config, config.hidden_size)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, beside: Beside) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        y = self.attention_convolution(self.attention_norm(x), beside.positions)
        x = x + self.attention(y, beside)
        y = self.feed_forward_convolution(self.feed_forward_norm(x), beside.positions)
        return x + self.feed_forward(y)


class PopxlGPTForCausalLM(PreTrainedModel, GenerationMixin):
    """The model; parameters have the names of the checkpoint that it was made of, but the head's:
    transformers takes a module `head` for the tied `lm_head`.
    """

    config: PopxlGPTConfig
    config_class = PopxlGPTConfig
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    _tied_weights_keys = {"lm_head.weight": "embedding.word.weight"}

    def __init__(self, config: PopxlGPTConfig):
        super().__init__(config)
        self.embedding = Embedding(config)
        self.decoder = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = norm(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The words' vectors."""
        return self.embedding.word

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Fresh weights, of a model that is made of its configuration alone."""
        super()._init_weights(module)
        if isinstance(module, Linear | ValueEmbedding | Bigram):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, ShortConvolution | TokenShift):
            nn.init.zeros_(module.weight)
        if isinstance(module, ValueEmbedding):
            nn.init.ones_(module.mix)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **others: object,
    ) -> CausalLMOutput:
        """Logits of the next words, float32 [B, S, V], of int [B, S].

        Args:
            attention_mask: int [B, S], zero for tokens that are no text.
            labels: int [B, S], the words themselves, of which those that are -100 do not count: the
                result has the mean loss of each word after those before it.
            others: `num_items_in_batch`, by which the sum of losses is divided in place of the
                number of words here.
        """
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        beside = self._beside(input_ids, real)
        x = self.embedding(input_ids, beside.positions)
        for block in self.decoder:
            x = block(x, beside)
        logits, cap = self.lm_head(self.norm(x)).float(), self.config.logit_softcap
        if cap:
            logits = cap * torch.tanh(logits / cap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **others)
        return CausalLMOutput(loss=loss, logits=logits)

    def _beside(self, words: Tensor, real: Tensor) -> Beside:
        positions = (real.cumsum(1) - 1).clamp(min=0)
        each = torch.ones(words.shape[1], words.shape[1], dtype=torch.bool, device=words.device)
        mask = (real.bool()[:, None, None] & each.tril()) | each.diag().diag()
        has_angles = self.config.position_embedding == "rotary"
        angles = angles_of(self.config, positions) if has_angles else None
        return Beside(words, positions, mask, angles)

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: object
    ) -> dict[str, Tensor | None]:
        """The whole text, each time."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}
