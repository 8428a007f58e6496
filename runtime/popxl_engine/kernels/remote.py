"""Transfers to and from remote memory: the replica's handle does them. Offsets are host scalars."""

from typing import Any

import torch

from popxl_engine.kernels.registry import kernel


@kernel("remote_load")
def remote_load(
    replica: Any, remote_buffer: Any, offset: int | torch.Tensor, name: str | None
) -> torch.Tensor:
    """The slot's value."""
    return replica.remote_load(remote_buffer, int(offset))


@kernel("remote_load_")
def remote_load_(
    replica: Any, remote_buffer: Any, offset: int | torch.Tensor, t: torch.Tensor
) -> torch.Tensor:
    """The slot's value, copied into t."""
    return t.copy_(replica.remote_load(remote_buffer, int(offset)))


@kernel("remote_store")
def remote_store(
    replica: Any, remote_buffer: Any, offset: int | torch.Tensor, t: torch.Tensor
) -> None:
    """The slot becomes t."""
    replica.remote_store(remote_buffer, int(offset), [t])
