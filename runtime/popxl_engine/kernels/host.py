"""Transfers over host streams: the replica's handle does them."""

from typing import Any

import torch

from popxl_engine.kernels.registry import kernel


@kernel("host_load")
def host_load(replica: Any, h2d_stream: Any, name: str | None) -> torch.Tensor:
    """The replica's next element of the stream."""
    return replica.host_load(h2d_stream)


@kernel("host_store")
def host_store(replica: Any, d2h_stream: Any, t: torch.Tensor) -> None:
    """The replica's next element of the stream becomes t."""
    replica.host_store(d2h_stream, t)


@kernel("begin_lap")
def begin_lap(replica: Any, label: str) -> None:
    """The replica's time counts to the label."""
    replica.begin_lap(label)
