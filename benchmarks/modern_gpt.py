"""A small GPT as speed runs train it today, in plain PyTorch: rotary positions, RMSNorm without
gains, normalised queries and keys, short convolutions, squared ReLU, value embeddings, an untied
head with capped logits, no biases, and Muon. A table of bigrams may stand beside that of words.

Weights are float32, all arithmetic but norms and losses is in the model's type. Nothing here knows
of the rest of the repository.

Sources: K. Jordan et al. 2024, "modded-nanogpt", github.com/KellerJordan/modded-nanogpt; So et al.
2021, "Primer", arXiv:2109.08668 (squared ReLU); Zhou et al. 2024, "Value Residual Learning",
arXiv:2410.17897; Gemma Team 2024, arXiv:2408.00118, section 2 (capped logits); Allen-Zhu 2025,
"Physics of Language Models: Part 4.1", arXiv:2512.17351 (short convolutions); Svenstrup et al.
2017, "Hash Embeddings", arXiv:1709.03933 (pairs of words that share rows).
"""

# B batch, S sequence, H hidden size, A heads, D = H / A, V vocabulary.
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The coefficients of Muon's Newton-Schulz iteration, from its authors."""
ITERATIONS = 5


@dataclass(frozen=True, kw_only=True)
class ModernModel:
    """Sizes, and the type of the arithmetic."""

    layers: int
    hidden_size: int
    heads: int
    sequence_length: int
    vocabulary_size: int
    value_embeddings: int = 2
    """Blocks, the last ones, that add an embedding of the word to attention's values."""
    convolution_size: int = 4
    """Tokens that a short convolution sees, the own one included; 1: there are none."""
    bigram_rows: int = 0
    """Of the table of bigrams; 0: there is none."""
    logit_cap: float = 15.0
    """Logits are this times tanh of themselves over this."""
    rotary_base: float = 10_000.0
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class ModernTraining:
    """Rates at their highest; a step's factor scales all of them."""

    matrix_rate: float = 0.02
    """Muon's, for updates whose root mean square is that of an orthogonal matrix."""
    embedding_rate: float = 0.2
    head_rate: float = 0.004
    bigram_rate: float = 0.2
    """Over that of words."""
    scalar_rate: float = 0.01
    momentum: float = 0.95
    betas: tuple[float, float] = (0.8, 0.95)
    epsilon: float = 1e-10
    weight_decay: float = 0.0


class Linear(nn.Linear):
    """Without a bias, in the type of what comes in."""

    def __init__(self, inputs: int, outputs: int, std: float):
        super().__init__(inputs, outputs, bias=False)
        nn.init.normal_(self.weight, std=std) if std else nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def norm(x: Tensor) -> Tensor:
    """x over the root of its mean square, along the last axis."""
    return F.rms_norm(x, (x.shape[-1],))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864): x [B, S, A, D], cos and sin
    [S, 1, D/2].
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)


class Convolution(nn.Module):
    """Adds to each token those shortly before it, each times a factor per channel. Starts as the
    identity.
    """

    def __init__(self, size: int, features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size - 1, features))  # the nearest token first

    def forward(self, x: Tensor) -> Tensor:  # [B, S, features]
        before, length = self.weight.shape[0], x.shape[1]
        rows, factors = F.pad(x, (0, 0, before, 0)), self.weight.to(x.dtype)
        for n in range(before):
            x = x + factors[n] * rows[:, before - 1 - n :][:, :length]
        return x


class Bigrams(nn.Module):
    """A vector for each pair of words, from a table of fewer rows; starts with zeros."""

    def __init__(self, rows: int, model: ModernModel):
        super().__init__()
        self.table = nn.Embedding(rows, model.hidden_size)
        nn.init.zeros_(self.table.weight)
        step = round(rows * (math.sqrt(5) - 1) / 2)  # words before lie far apart
        offsets = torch.arange(model.vocabulary_size + 1) * step % rows  # the first: of none
        self.register_buffer("offsets", offsets, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:  # [B, S] -> [B, S, H]
        before = F.pad(ids[:, :-1] + 1, (1, 0))
        return self.table((ids + self.offsets[before]) % self.table.num_embeddings)


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and added to what comes in."""

    def __init__(self, model: ModernModel, has_value_embedding: bool):
        super().__init__()
        self.model, hidden = model, model.hidden_size
        self.qkv = Linear(hidden, 3 * hidden, hidden**-0.5)
        self.output = Linear(hidden, hidden, 0.0)
        self.up = Linear(hidden, 4 * hidden, hidden**-0.5)
        self.down = Linear(4 * hidden, hidden, 0.0)
        self.value_shares = nn.Parameter(torch.tensor([0.5, 0.5])) if has_value_embedding else None
        features = {"attention": hidden, "qkv": 3 * hidden, "feed_forward": hidden}
        size = model.convolution_size
        made = {
            name: Convolution(size, n) if size > 1 else nn.Identity()
            for name, n in features.items()
        }
        self.convolutions = nn.ModuleDict(made)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, word_values: Tensor | None) -> Tensor:
        batch, sequence, hidden = x.shape
        qkv = self.convolutions["qkv"](self.qkv(self.convolutions["attention"](norm(x))))
        q, k, v = qkv.view(batch, sequence, 3, self.model.heads, -1).unbind(2)  # each [B, S, A, D]
        if word_values is not None:
            v = self.mixed(v, word_values.view_as(v), x)
        q, k = rotated(norm(q), cos, sin), rotated(norm(k), cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.output(self.attended(y, x).reshape(batch, sequence, hidden))
        return x + self.down(F.relu(self.up(self.convolutions["feed_forward"](norm(x)))).square())

    def mixed(self, values: Tensor, word_values: Tensor, x: Tensor) -> Tensor:
        """Values with those of words, of a block with such an input, [B, S, A, D]."""
        own, word = self.value_shares.to(values.dtype)
        return own * values + word * word_values

    def attended(self, y: Tensor, x: Tensor) -> Tensor:
        """What heads found, as the output takes it, of a block with such an input,
        [B, S, A, D].
        """
        return y


class ModernGPT(nn.Module):
    """The model; `forward` is the mean loss."""

    block: ClassVar[type[Block]] = Block

    def __init__(self, model: ModernModel):
        super().__init__()
        self.model, size = model, (model.vocabulary_size, model.hidden_size)
        self.word = nn.Embedding(*size)
        self.bigrams = Bigrams(model.bigram_rows, model) if model.bigram_rows else None
        first = model.layers - model.value_embeddings
        self.values = nn.ModuleList(nn.Embedding(*size) for _ in range(model.value_embeddings))
        self.blocks = nn.ModuleList(self.block(model, n >= first) for n in range(model.layers))
        self.head = Linear(model.hidden_size, model.vocabulary_size, 0.0)
        half = model.hidden_size // model.heads // 2
        speeds = model.rotary_base ** -(torch.arange(half) / half)
        angles = torch.arange(model.sequence_length)[:, None, None] * speeds
        self.register_buffer("cos", angles.cos().to(model.dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(model.dtype), persistent=False)

    def logits(self, ids: Tensor) -> Tensor:
        """Scores of the next token, float32: ids [B, S] -> [B, S, V]."""
        dtype, cap = self.model.dtype, self.model.logit_cap
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        inputs, without = [self.embedded(ids)], len(self.blocks) - len(self.values)
        for number, block in enumerate(self.blocks):
            has_values = number >= without
            values = self.values[number - without](ids).to(dtype) if has_values else None
            inputs.append(block(self.into(number, inputs), cos, sin, values))
        return cap * torch.tanh(self.head(norm(self.into(len(self.blocks), inputs))).float() / cap)

    def embedded(self, ids: Tensor) -> Tensor:
        """What the first block gets: ids [B, S] -> [B, S, H]."""
        x = self.word(ids) if self.bigrams is None else self.word(ids) + self.bigrams(ids)
        return norm(x.to(self.model.dtype))

    def into(self, number: int, inputs: Sequence[Tensor]) -> Tensor:
        """What a block, or at last the head, makes of what the embedding and all blocks before it
        gave, [B, S, H].
        """
        return inputs[-1]

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy: ids and labels [B, S] -> []."""
        return F.cross_entropy(self.logits(ids).flatten(0, 1), labels.flatten())

    def matrices(self) -> list[Tensor]:
        """Weights of the blocks' products, which Muon updates."""
        return [module.weight for module in self.blocks.modules() if isinstance(module, Linear)]


def orthogonal(
    matrices: Tensor,
    coefficients: Sequence[tuple[float, float, float]] = (COEFFICIENTS,) * ITERATIONS,
    margin: float = 1.0,
) -> Tensor:
    """Matrices with singular values near one, [n, rows, columns], rows at most columns.

    Args:
        coefficients: of each iteration.
        margin: how far singular values are below one at first.
    """
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) * margin + 1e-7)
    for first, third, fifth in coefficients:
        square = x @ x.mT
        x = first * x + torch.baddbmm(square * third, square, square, alpha=fifth) @ x
    return x


def wide(matrix: Tensor) -> Tensor:
    """A matrix, turned where it has more rows than columns."""
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix


class Muon:
    """Updates matrices by their momentum, made orthogonal; those of one shape together.

    Args:
        pieces: for a matrix of several side by side, along its rows: how many.
    """

    def __init__(self, matrices: Sequence[tuple[Tensor, int]], momentum: float, dtype: torch.dtype):
        self.momentum, self.dtype = momentum, dtype
        self.groups: dict[tuple[int, int], list[tuple[Tensor, int]]] = {}
        for p, pieces in matrices:
            rows, columns = p.shape[0] // pieces, p.shape[1]
            shape = min(rows, columns), max(rows, columns)
            self.groups.setdefault(shape, []).append((p, pieces))
        self.momenta: dict[tuple[int, int], Tensor] = {}
        """Of the matrices of each shape, [n, *shape]."""

    @torch.no_grad()
    def step(self, rate: float, weight_decay: float) -> None:
        """Update each matrix from its `.grad`."""
        for shape, group in self.groups.items():
            gradients = [wide(part) for p, pieces in group for part in p.grad.chunk(pieces)]
            updates = iter(self.directions(shape, torch.stack(gradients)))
            for p, pieces in group:
                for part in p.chunk(pieces):
                    u = next(updates)
                    u = u.mT if part.shape[0] > part.shape[1] else u
                    self.update(part, u, rate, weight_decay)

    def directions(self, shape: tuple[int, int], gradients: Tensor) -> Tensor:
        """The updates of the matrices of a shape before their rate: float32, [n, *shape]."""
        if shape not in self.momenta:
            self.momenta[shape] = torch.zeros_like(gradients)
        m = self.momenta[shape].lerp_(gradients, 1 - self.momentum)
        return self.orthogonal(gradients.lerp(m, self.momentum).to(self.dtype)).float()

    def orthogonal(self, matrices: Tensor) -> Tensor:
        """The updates of momenta of one shape."""
        return orthogonal(matrices)

    def update(self, part: Tensor, u: Tensor, rate: float, weight_decay: float) -> None:
        """Move a matrix, which may be one of several side by side."""
        scale = math.sqrt(max(1.0, part.shape[0] / part.shape[1]))
        part.mul_(1 - rate * weight_decay)
        part.add_(u, alpha=-rate * scale)


class ModernTrainer:
    """The training loop: Muon for the blocks' matrices, AdamW for the rest.

    Args:
        compiled: run the model through `torch.compile`.
    """

    def __init__(self, gpt: ModernGPT, training: ModernTraining, *, compiled: bool = False):
        self.gpt, self.training = gpt, training
        self.loss = torch.compile(gpt, dynamic=False) if compiled else gpt
        matrices = {id(p) for p in gpt.matrices()}
        scalars = [p for p in gpt.blocks.parameters() if id(p) not in matrices]
        width = math.sqrt(768 / gpt.model.hidden_size)  # rates are given for a width of 768
        words = training.embedding_rate * width
        groups = [
            ([gpt.word.weight, *gpt.values.parameters()], words),
            (
                [] if gpt.bigrams is None else [gpt.bigrams.table.weight],
                training.bigram_rate * words,
            ),
            ([gpt.head.weight], training.head_rate * width),
            (scalars, training.scalar_rate),
        ]
        self.adam = torch.optim.AdamW(
            [{"params": ps, "lr": rate, "highest": rate} for ps, rate in groups if ps],
            betas=training.betas,
            eps=training.epsilon,
            weight_decay=0.0,
            fused=True,
        )
        pieces = [(b.qkv.weight, 3) for b in gpt.blocks]
        pieces += [(m.weight, 1) for b in gpt.blocks for m in (b.output, b.up, b.down)]
        self.muon = Muon(pieces, training.momentum, gpt.model.dtype)

    def step(self, ids: Tensor, labels: Tensor, factor: float) -> float:
        """One optimizer step with all rates times a factor; returns the loss before it."""
        self.adam.zero_grad(set_to_none=True)
        for p in self.gpt.matrices():
            p.grad = None
        loss = self.loss(ids, labels)
        loss.backward()
        for group in self.adam.param_groups:
            group["lr"] = group["highest"] * factor
        self.adam.step()
        self.muon.step(self.training.matrix_rate * factor, self.training.weight_decay)
        return loss.item()
