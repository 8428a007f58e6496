"""Muon as a plain loop, in whatever type the parameters have."""

import math
from typing import Any

import torch

from benchmarks.plain_gpt import PlainGPT
from popxl_gpt.config.schema import Training
from tests.integration.plain_adamw import PlainAdamW

MATRICES = {"c_attn.weight": (1, 1, 1), "c_proj.weight": (1,), "c_fc.weight": (1,)}
"""Ends of the names of what Muon updates, with the parts of its columns that are matrices."""


def newton_schulz(u: torch.Tensor) -> torch.Tensor:
    """Five steps of the quintic iteration, for one matrix [rows, columns]."""
    x = u.T if u.shape[0] > u.shape[1] else u
    x = x / (torch.linalg.norm(x) + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if u.shape[0] > u.shape[1] else x


@torch.no_grad()
def update_(
    p: torch.Tensor,
    momentum: torch.Tensor,
    blocks: "tuple[int, ...]",
    training: Training,
    rate: float,
) -> None:
    """Change a matrix [in, out], of several side by side, and its momentum by its `.grad`."""
    mu = training.muon_momentum
    momentum.mul_(mu).add_(p.grad, alpha=1 - mu)
    ahead = momentum * mu + p.grad * (1 - mu)
    widths = [ahead.shape[1] * part // sum(blocks) for part in blocks]
    matrices = ahead.split(widths, dim=1)
    moved = [newton_schulz(u) * 0.2 * math.sqrt(max(u.shape)) for u in matrices]
    p.sub_(rate * (torch.cat(moved, dim=1) + training.weight_decay * p))


class PlainMuon:
    """Muon for the matrices of the blocks, AdamW for the rest."""

    def __init__(self, gpt: PlainGPT, groups: "list[dict[str, Any]]", training: Training):
        self.training = training
        self.matrices = [
            (p, torch.zeros_like(p), blocks)
            for name, p in gpt.named_parameters()
            for end, blocks in MATRICES.items()
            if name.endswith(end)
        ]
        mine = {id(p) for p, *_ in self.matrices}
        rest = [{**g, "params": [p for p in g["params"] if id(p) not in mine]} for g in groups]
        betas = (training.beta1, training.beta2)
        self.adamw = PlainAdamW(rest, lr=0.0, betas=betas, eps=training.epsilon)
        self.param_groups = self.adamw.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """One update, by the learning rate of the first group."""
        self.adamw.step()
        rate = self.param_groups[0]["lr"]
        for p, momentum, blocks in self.matrices:
            update_(p, momentum, blocks, self.training, rate)
