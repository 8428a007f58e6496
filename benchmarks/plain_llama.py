"""A model of the Llama family in plain PyTorch, for `plain_gpt.PlainTrainer`: RMS norms, rotary
positions, grouped queries, SwiGLU, no biases.

Sources: Touvron et al. 2023, arXiv:2302.13971; Su et al. 2021, arXiv:2104.09864.
"""

# B batch, S sequence, H hidden size, A heads, D = H / A, V vocabulary.
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.modern_gpt import Linear, rotated
from benchmarks.plain_gpt import PlainGPT


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and added to what comes in."""

    def __init__(self, model: Any):
        super().__init__()
        self.heads, self.shared, self.size = model.heads, model.key_value, model.head_width
        hidden, wide, std = model.hidden_size, model.feed_forward, model.initial_std
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, eps=model.layer_norm_eps) for _ in range(2))
        self.qkv = Linear(hidden, (self.heads + 2 * self.shared) * self.size, std)
        self.output = Linear(hidden, hidden, std)
        self.gate_up, self.down = Linear(hidden, 2 * wide, std), Linear(wide, hidden, std)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, sequence, -1, self.size)
        q, k, v = qkv.split((self.heads, self.shared, self.shared), dim=2)  # each [B, S, A, D]
        q, k, v = (t.transpose(1, 2) for t in (rotated(q, cos, sin), rotated(k, cos, sin), v))
        grouped = self.heads != self.shared
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.output(y.transpose(1, 2).reshape(batch, sequence, hidden))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class PlainLlama(nn.Module):
    """The model; each block keeps only what goes into it.

    Args:
        model: sizes, as the application's `Model` has them.
    """

    parameter_groups = PlainGPT.parameter_groups

    def __init__(self, model: Any):
        super().__init__()
        self.words, self.hidden = model.vocabulary_size, model.hidden_size
        self.embedding = nn.Embedding(self.words, self.hidden)
        nn.init.normal_(self.embedding.weight, std=model.initial_std)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm = nn.RMSNorm(self.hidden, eps=model.layer_norm_eps)
        self.head = Linear(self.hidden, self.words, model.initial_std)
        if model.tied_head:
            self.head.weight = self.embedding.weight
        half = model.head_width // 2
        speeds = model.rotary_base ** -(torch.arange(half) / half)
        angles = torch.arange(model.sequence_length)[:, None, None] * speeds
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", -angles.sin(), persistent=False)  # `rotated` turns back

    def logits(self, ids: Tensor) -> Tensor:
        """Scores of the next token: ids [B, S] -> [B, S, V]."""
        x = self.embedding(ids)
        cos, sin = (t[: ids.shape[1]] for t in (self.cos, self.sin))
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False)
        return self.head(self.norm(x))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy: ids and labels [B, S] -> []."""
        return F.cross_entropy(self.logits(ids).view(-1, self.words), labels.reshape(-1))
