"""Hugging Face's GPT-2 behind the interface of `plain_gpt.PlainGPT`, for the same trainer. Needs
transformers.
"""

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.plain_gpt import PlainGPT, PlainModel


class HuggingFaceGPT(nn.Module):
    """GPT-2 by Hugging Face, with PyTorch's fused attention."""

    def __init__(self, model: PlainModel):
        super().__init__()
        self.gpt = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=model.vocabulary_size,
                n_positions=model.sequence_length,
                n_embd=model.hidden_size,
                n_layer=model.layers,
                n_head=model.heads,
                embd_pdrop=model.dropout,
                attn_pdrop=model.dropout,
                resid_pdrop=model.dropout,
                layer_norm_epsilon=model.layer_norm_eps,
                initializer_range=model.initial_std,
                use_cache=False,
                attn_implementation="sdpa",
            )
        )

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy: ids and labels [B, S] -> []. Labels are shifted: labels[:, i] follows
        ids[:, i].
        """
        logits = self.gpt(input_ids=ids).logits
        return torch.nn.functional.cross_entropy(
            logits.view(-1, logits.shape[-1]), labels.reshape(-1)
        )

    parameter_groups = PlainGPT.parameter_groups
