"""AdamW as a formula, in whatever type the parameters have."""

from collections.abc import Iterable

import torch
from torch import Tensor


class PlainAdamW(torch.optim.Optimizer):
    """AdamW as a formula: u = m̂ / (√v̂ + ε) + decay·p; p -= lr·u. Slow; the one to compare numbers
    with.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101.
    """

    def __init__(self, groups: Iterable, lr: float, betas: tuple[float, float], eps: float):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update each parameter from its `.grad`."""
        for group in self.param_groups:
            for p in group["params"]:
                self._update(p, p.grad, self.state[p], group)

    @staticmethod
    def _update(p: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        beta1, beta2 = group["betas"]
        step = state["step"] = state.get("step", 0) + 1
        m = state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * grad
        v = state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * grad * grad
        u = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + group["eps"]) + group[
            "weight_decay"
        ] * p
        p -= group["lr"] * u
