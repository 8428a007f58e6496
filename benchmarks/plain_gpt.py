"""GPT-2 and its training loop in plain PyTorch: the baseline of the benchmarks, and an oracle for
numbers.

The architecture and the names of parameters are those of Hugging Face's GPT-2 (linear weights lie
[in, out]), so a state dict goes either way without a mapping. Nothing here knows of the rest of the
repository.
"""

# B batch, S sequence, H hidden size, A heads, D = H / A, V vocabulary.
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class PlainModel:
    """Sizes of the model, and how its parts are computed. No choice of the second group changes the
    function.
    """

    layers: int
    hidden_size: int
    heads: int
    sequence_length: int
    """Tokens; also the number of learned positions."""
    vocabulary_size: int = 50257
    dropout: float = 0.0
    """Probability, after the embedding, on attention probabilities and on both residual
    branches.
    """
    initial_std: float = 0.02
    layer_norm_eps: float = 1e-5

    attention: Literal["fused", "products"] = "fused"
    """`fused` is PyTorch's scaled_dot_product_attention; `products` two batched products around a
    softmax.
    """
    gelu: Literal["tanh", "sigmoid"] = "tanh"
    """How to write the same function: 0.5·x·(1 + tanh u) or x·sigmoid(2u). The second is for
    compilers.
    """


@dataclass(frozen=True, kw_only=True)
class PlainTraining:
    """AdamW with clipping and a schedule; one `learning_rate` for each optimizer step."""

    steps: int
    learning_rate: float
    minimum_learning_rate: float = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = 0.0
    """Clip the global gradient norm to this; 0 does not clip."""

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0; the last step has the minimum."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / (self.warmup_steps + 1)
        length = self.steps - 1 - self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / length) if length > 0 else 0.0
        share = {
            "constant": 1.0,
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        }
        return self.minimum_learning_rate + share[self.schedule] * (
            self.learning_rate - self.minimum_learning_rate
        )


class Linear(nn.Module):
    """x @ weight + bias with the bias inside the product; weight [in, out]."""

    def __init__(self, inputs: int, outputs: int, std: float):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * std)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(
            *x.shape[:-1], -1
        )


class Attention(nn.Module):
    """Causal self-attention; the columns of `c_attn` are query, key, value."""

    def __init__(self, model: PlainModel):
        super().__init__()
        self.model = model
        residual_std = model.initial_std / math.sqrt(2 * model.layers)
        self.c_attn = Linear(model.hidden_size, 3 * model.hidden_size, model.initial_std)
        self.c_proj = Linear(model.hidden_size, model.hidden_size, residual_std)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        heads, dropout = self.model.heads, self.model.dropout if self.training else 0.0
        # each [B, A, S, D]
        q, k, v = self.c_attn(x).view(batch, sequence, 3, heads, -1).permute(2, 0, 3, 1, 4)
        if self.model.attention == "fused":
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            q, k, v = (t.reshape(batch * heads, sequence, -1) for t in (q, k, v))
            above = torch.full(
                (sequence, sequence), -math.inf, dtype=q.dtype, device=q.device
            ).triu(1)
            # [B*A, S, S]
            scores = torch.baddbmm(above, q, k.transpose(1, 2), alpha=1 / math.sqrt(q.shape[-1]))
            share = F.dropout(torch.softmax(scores, dim=-1, dtype=q.dtype), dropout)
            y = torch.bmm(share, v).view(batch, heads, sequence, -1)
        return self.c_proj(y.transpose(1, 2).reshape(batch, sequence, hidden))


class FeedForward(nn.Module):
    """Two linear layers with the tanh form of GELU between them."""

    def __init__(self, model: PlainModel):
        super().__init__()
        self.gelu = gelu_by_sigmoid if model.gelu == "sigmoid" else gelu_by_tanh
        self.c_fc = Linear(model.hidden_size, 4 * model.hidden_size, model.initial_std)
        self.c_proj = Linear(
            4 * model.hidden_size,
            model.hidden_size,
            model.initial_std / math.sqrt(2 * model.layers),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


def gelu_by_tanh(x: Tensor) -> Tensor:
    """GELU, tanh form (Hendrycks and Gimpel 2016, arXiv:1606.08415), by PyTorch's own kernel."""
    return F.gelu(x, approximate="tanh")


def gelu_by_sigmoid(x: Tensor) -> Tensor:
    """The same function: 0.5·(1 + tanh u) = sigmoid(2u)."""
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


class Block(nn.Module):
    """Pre-norm decoder block."""

    def __init__(self, model: PlainModel):
        super().__init__()
        self.ln_1 = nn.LayerNorm(model.hidden_size, eps=model.layer_norm_eps)
        self.attn = Attention(model)
        self.ln_2 = nn.LayerNorm(model.hidden_size, eps=model.layer_norm_eps)
        self.mlp = FeedForward(model)
        self.dropout = nn.Dropout(model.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.ln_1(x)))
        return x + self.dropout(self.mlp(self.ln_2(x)))


class PlainGPT(nn.Module):
    """GPT-2 with the head tied to the word embedding.

    Parameter names are those of Hugging Face's `GPT2Model` (`wte.weight`, `h.0.attn.c_attn.weight`,
    ...): load a `GPT2LMHeadModel` by
    `plain.load_state_dict(hugging_face.transformer.state_dict())`.
    """

    def __init__(self, model: PlainModel):
        super().__init__()
        self.model = model
        self.wte = nn.Embedding(model.vocabulary_size, model.hidden_size)
        self.wpe = nn.Embedding(model.sequence_length, model.hidden_size)
        nn.init.normal_(self.wte.weight, std=model.initial_std)
        nn.init.normal_(self.wpe.weight, std=model.initial_std)
        self.drop = nn.Dropout(model.dropout)
        self.h = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.ln_f = nn.LayerNorm(model.hidden_size, eps=model.layer_norm_eps)

    def logits(self, ids: Tensor) -> Tensor:
        """Scores of the next token: ids [B, S] -> [B, S, V]."""
        x = self.drop(self.wte(ids) + self.wpe.weight[: ids.shape[1]])
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy: ids and labels [B, S] -> []. Labels are shifted: labels[:, i] follows
        ids[:, i].
        """
        return F.cross_entropy(
            self.logits(ids).view(-1, self.model.vocabulary_size), labels.reshape(-1)
        )

    def parameter_groups(self, weight_decay: float) -> list[dict[str, object]]:
        """Matrices and embeddings decay; layer norms and biases do not."""
        decayed = [p for p in self.parameters() if p.ndim == 2]
        spared = [p for p in self.parameters() if p.ndim != 2]
        return [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": spared, "weight_decay": 0.0},
        ]


class PlainTrainer:
    """The training loop: gradient accumulation, clipping, schedule, and PyTorch's fused AdamW with
    the clip scale inside its one pass over the state.

    Args:
        compiled: run the model through `torch.compile`.
        dtype: bfloat16 runs products under autocast; weights, gradients and moments stay float32.
    """

    def __init__(
        self,
        gpt: PlainGPT,
        training: PlainTraining,
        *,
        compiled: bool = False,
        dtype: torch.dtype = torch.float32,
    ):
        self.gpt, self.training, self.dtype = gpt, training, dtype
        self.parameters = list(gpt.parameters())
        self.loss: Callable[[Tensor, Tensor], Tensor] = (
            torch.compile(gpt, dynamic=False) if compiled else gpt
        )
        self.optimizer = torch.optim.AdamW(
            gpt.parameter_groups(training.weight_decay),
            lr=training.learning_rate,
            betas=(training.beta1, training.beta2),
            eps=training.epsilon,
            fused=True,
        )
        self.done = 0
        self.gradient_norm = 0.0

    def autocast(self):
        """The context in which products run in `dtype`. One for all micro-batches: it keeps the
        weights' casts.
        """
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.parameters[0].device.type, dtype=self.dtype)

    def gradients(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        """Accumulate gradients of the mean loss of equal (ids, labels), each [B, S], into `.grad`;
        return that loss.
        """
        total = torch.zeros((), device=self.parameters[0].device)
        with self.autocast():
            for ids, labels in micro_batches:
                loss = self.loss(ids, labels) / len(micro_batches)
                loss.backward()
                total += loss.detach()
        return total.item()

    def step(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        """One optimizer step; returns the loss before it."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.gradients(micro_batches)
        for group in self.optimizer.param_groups:
            group["lr"] = self.training.learning_rate_at(self.done)
        self._clip()
        self.optimizer.step()
        self.done += 1
        return loss

    @torch.no_grad()
    def _clip(self) -> None:
        """Scale gradients by max_norm / max(norm, max_norm); the norm is over all parameters, the
        tied weight once.
        """
        if not self.training.max_norm:
            return
        gradients = [p.grad for p in self.parameters]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        self.gradient_norm = norm.item()
        # the kernel divides by it as it reads the gradient
        divisor = torch.clamp(norm, min=self.training.max_norm) / self.training.max_norm
        self.optimizer.grad_scale = divisor.float()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
        """Mean loss per token over (ids, labels) of any sizes, dropout off."""
        self.gpt.eval()
        total, tokens = 0.0, 0
        with self.autocast():
            for ids, labels in batches:
                total += self.loss(ids, labels).item() * labels.numel()
                tokens += labels.numel()
        self.gpt.train()
        return total / tokens
