"""Conversion between element types."""

import torch
from popxl import dtypes

from popxl_engine.kernels.dtypes import torch_dtype
from popxl_engine.kernels.registry import kernel


@kernel("cast")
def cast(t: torch.Tensor, data_type: dtypes.dtype) -> torch.Tensor:
    """t in another element type, in memory of its own."""
    return t.to(torch_dtype(data_type), copy=True)
