"""The modern recipe in plain PyTorch with techniques of other recipes, for `screening.py`.

Sources: Amsel et al. 2025, "The Polar Express", arXiv:2505.16932; Li et al. 2025, "NorMuon",
arXiv:2510.05491; Jordan et al. 2024, "modded-nanogpt"; Karpathy 2025, "nanochat"; Qiu et al. 2025,
"Gated Attention for Large Language Models", arXiv:2505.06708; Chen et al. 2025, "Cautious Weight
Decay", arXiv:2510.12402; Vyas et al. 2024, "SOAP", arXiv:2409.11321; Gloeckle et al. 2024, "Better
& Faster Large Language Models via Multi-token Prediction", arXiv:2404.19737, but here by the same
head, as the speed run of modded-nanogpt has it.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import modern_gpt
from benchmarks.modern_gpt import ModernGPT, ModernModel, ModernTrainer, ModernTraining

CAUTIOUS = 0.1
"""Weight decay, times the rate, where update and weight agree in sign."""
FEATURES = 12
"""Of a token, from which gates are made."""
EARLY = 1 / 3
"""Share of a run within which short sequences, small batches and predictions of the second next
token are tried.
"""
SECOND = 0.5
"""Weight of the second next token's loss beside the next one's, at first."""
LENGTH = 0.5
"""Of SOAP's updates, over that of Muon's: the best of 1/8, 1/4, 1/2, 1 and 2."""
BETA, EPSILON, REFRESH = 0.95, 1e-8, 10
"""SOAP's moments keep so much of themselves in a step; what is added to the root of the second
ones; and in how many steps it finds eigenvectors once.
"""
POLAR = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""The coefficients of each step of the Polar Express, with its safety factor of 1.02."""


def polar(matrices: Tensor) -> Tensor:
    """`modern_gpt.orthogonal` by the Polar Express."""
    return modern_gpt.orthogonal(matrices, POLAR, margin=1.02)


class Gate(nn.Module):
    """A number of 0 to 2 for each head of a token, from its first features; starts at 1."""

    def __init__(self, heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads, FEATURES))

    def forward(self, x: Tensor) -> Tensor:  # [B, S, H] -> [B, S, heads, 1]
        return 2 * torch.sigmoid(F.linear(x[..., :FEATURES], self.weight.to(x.dtype)))[..., None]


class GatedBlock(modern_gpt.Block):
    """A block with gates, where it has them."""

    def __init__(self, model: ModernModel, has_value_embedding: bool):
        super().__init__(model, has_value_embedding)
        self.value_gate = self.head_gate = None

    def mixed(self, values: Tensor, word_values: Tensor, x: Tensor) -> Tensor:
        """Values with those of words."""
        gated = word_values if self.value_gate is None else word_values * self.value_gate(x)
        return super().mixed(values, gated, x)

    def attended(self, y: Tensor, x: Tensor) -> Tensor:
        """What heads found."""
        return y if self.head_gate is None else y * self.head_gate(x)


class ScreenedGPT(ModernGPT):
    """The modern model with techniques, by their names."""

    block = GatedBlock

    def __init__(self, model: ModernModel, techniques: frozenset[str]):
        super().__init__(model)
        self.techniques, heads = techniques, model.heads
        for block in self.blocks:
            if "value_gates" in techniques and block.value_shares is not None:
                block.value_gate = Gate(heads)
            if "attention_gates" in techniques:
                block.head_gate = Gate(heads)
            if "residual_scales" in techniques:
                block.scales = nn.Parameter(torch.tensor([1.0, 0.0]))
        if "back_out" in techniques:
            self.blocks[0].back_out = nn.Parameter(torch.tensor(0.2))
        if "smear" in techniques:
            self.blocks[0].smear = nn.Parameter(torch.zeros(1 + FEATURES))
        self.register_buffer("second_weight", torch.tensor(SECOND), persistent=False)

    def begin_step(self, share: float) -> None:
        """Be told that such a share of the run's steps is over."""
        self.second_weight.fill_(SECOND * max(0.0, 1 - share / EARLY))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy, with what a technique adds: ids and labels [B, S] -> []."""
        if "multi_token" not in self.techniques:
            return super().forward(ids, labels)
        logits = self.logits(ids)
        first = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        second = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return first + self.second_weight * second

    def embedded(self, ids: Tensor) -> Tensor:
        """What the first block gets."""
        x = super().embedded(ids)
        if "smear" in self.techniques:
            scale, weight = self.blocks[0].smear.to(x.dtype).tensor_split([1])
            share = scale * torch.sigmoid(x[..., :FEATURES] @ weight)[..., None]
            x = x + share * F.pad(x[:, :-1], (0, 0, 1, 0))
        return x

    def into(self, number: int, inputs: Sequence[Tensor]) -> Tensor:
        """What a block, or at last the head, makes of what was before it."""
        x, layers = super().into(number, inputs), len(self.blocks)
        if "residual_scales" in self.techniques and number < layers:
            own, of_first = self.blocks[number].scales.to(x.dtype)
            x = own * x + of_first * inputs[0]
        if "back_out" in self.techniques and number == layers:
            x = x - self.blocks[0].back_out.to(x.dtype) * inputs[layers // 2]
        return x


class ScreenedMuon(modern_gpt.Muon):
    """Muon with techniques."""

    def __init__(self, techniques: frozenset[str], *arguments: Any):
        super().__init__(*arguments)
        self.techniques, self.steps = techniques, 0
        self.seconds: dict[int, Tensor] = {}
        """NorMuon's second moments of the rows of each matrix, by where it lies."""

    @torch.no_grad()
    def step(self, rate: float, weight_decay: float) -> None:
        """Update each matrix from its `.grad`."""
        self.steps += 1
        if "momentum_warmup" in self.techniques:
            self.momentum = 0.85 + 0.1 * min(1.0, self.steps / 300)
        super().step(rate, weight_decay)

    def orthogonal(self, matrices: Tensor) -> Tensor:
        """The updates of momenta of one shape."""
        is_polar = "polar_express" in self.techniques
        return polar(matrices) if is_polar else super().orthogonal(matrices)

    def update(self, part: Tensor, u: Tensor, rate: float, weight_decay: float) -> None:
        """Move a matrix, which may be one of several side by side."""
        if "normuon" in self.techniques:
            u = self._even(u, part)
        if "cautious_decay" in self.techniques:
            part.sub_(rate * CAUTIOUS * part * (u * part > 0))
        super().update(part, u, rate, weight_decay)

    def _even(self, u: Tensor, part: Tensor) -> Tensor:
        """An update whose rows have been made even by their second moments, as large as before."""
        key = part.data_ptr()
        mean = u.square().mean(dim=1, keepdim=True)
        moment = self.seconds.setdefault(key, torch.zeros_like(mean)).lerp_(mean, 1 - 0.95)
        even = u / (moment.sqrt() + 1e-8)
        return even * (u.norm() / even.norm().clamp(min=1e-12))  # fresh projections pass nothing on


class Eigenbasis:
    """Adam in the eigenvectors of the mean products of gradients' rows and of their columns.

    Args:
        gradients: some of those to come, [n, rows, columns], for their shape.
    """

    def __init__(self, gradients: Tensor):
        count, *sides = gradients.shape
        self.steps = 0
        self.first, self.second = torch.zeros_like(gradients), torch.zeros_like(gradients)
        self.products = [gradients.new_zeros(count, side, side) for side in sides]
        self.vectors = list(self.products)

    def direction(self, gradients: Tensor) -> Tensor:
        """Adam's updates of the matrices, before their rate, [n, rows, columns]."""
        for product, g in zip(self.products, (gradients, gradients.mT)):
            product.lerp_(g @ g.mT, 1 - BETA)
        if self.steps % REFRESH == 0:
            self.vectors = [torch.linalg.eigh(product)[1] for product in self.products]
        self.steps += 1
        rows, columns = self.vectors
        self.first.lerp_(gradients, 1 - BETA)
        self.second.lerp_((rows.mT @ gradients @ columns).square(), 1 - BETA)
        known = 1 - BETA**self.steps
        u = rows.mT @ (self.first / known) @ columns
        return rows @ (u / ((self.second / known).sqrt() + EPSILON)) @ columns.mT


class Soap(ScreenedMuon):
    """SOAP in Muon's place. Its updates have half of the length of Muon's at the same rate."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.bases: dict[tuple[int, int], Eigenbasis] = {}

    def directions(self, shape: tuple[int, int], gradients: Tensor) -> Tensor:
        """The updates of the matrices of a shape."""
        if shape not in self.bases:
            self.bases[shape] = Eigenbasis(gradients)
        found = self.bases[shape].direction(gradients)
        length = found.norm(dim=(1, 2), keepdim=True).clamp(min=1e-12)
        return found * (LENGTH * math.sqrt(shape[0]) / length)  # zero gradients move nothing


def trainer_of(
    technique: str, seed: int, model: ModernModel, *, compiled: bool = True
) -> ModernTrainer:
    """The recipe with one technique; "none" is none."""
    torch.manual_seed(seed)
    techniques = frozenset({technique} - {"none"})
    plain = ModernGPT(model)  # draws as every other does
    gpt = ScreenedGPT(model, techniques)
    gpt.load_state_dict(plain.state_dict(), strict=False)
    made = ModernTrainer(gpt, ModernTraining(), compiled=compiled)
    old = made.muon
    optimizer = Soap if "soap" in techniques else ScreenedMuon
    made.muon = optimizer(
        techniques, [each for g in old.groups.values() for each in g], old.momentum, old.dtype
    )
    return made
