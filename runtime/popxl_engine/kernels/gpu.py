"""Faster kernels for GPUs: few passes over memory, and nobody waits for a number of the device."""

from typing import Any

import torch

from popxl_engine.kernels.compiled import one_pass
from popxl_engine.kernels.registry import kernel
from popxl_engine.kernels.rounding import update
from popxl_engine.kernels.var_updates import factor, working


@kernel("accumulate_mean_", device="cuda")
def accumulate_mean_(t: torch.Tensor, X: torch.Tensor, step: Any) -> torch.Tensor:
    """t = t * step / (step + 1) + X / (step + 1); with step 0, what was there may be infinite or NaN."""
    return update(t, _mean(working(t, t), working(X, t), factor(step)))


@one_pass
def _mean(old: torch.Tensor, value: torch.Tensor, step: Any) -> torch.Tensor:
    """The mean of step + 1 values, of which the last is new."""
    kept = torch.where(torch.as_tensor(step, device=old.device) == 0, value, old)
    return kept + (value - kept) * (1 / (step + 1))
