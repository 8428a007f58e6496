"""popxl's element types in torch, and arithmetic on unsigned integers, which torch stores but does not compute with."""

from typing import Dict

import torch
from popxl import dtypes

TORCH: Dict[dtypes.dtype, torch.dtype] = {
    dtypes.bool: torch.bool,
    dtypes.int8: torch.int8,
    dtypes.int16: torch.int16,
    dtypes.int32: torch.int32,
    dtypes.int64: torch.int64,
    dtypes.uint8: torch.uint8,
    dtypes.uint16: torch.uint16,
    dtypes.uint32: torch.uint32,
    dtypes.uint64: torch.uint64,
    dtypes.float16: torch.float16,
    dtypes.bfloat16: torch.bfloat16,
    dtypes.float32: torch.float32,
    dtypes.float64: torch.float64,
    dtypes.complex64: torch.complex64,
    dtypes.complex128: torch.complex128,
}

LIMITED = (torch.uint16, torch.uint32, torch.uint64)
"""Types that torch stores without arithmetic: kernels compute in int64, which wraps to the same bits."""


def torch_dtype(dtype: dtypes.dtype) -> torch.dtype:
    """The torch type of tensors of a popxl type. TypeError if torch has none."""
    if dtype not in TORCH:
        raise TypeError(
            f"engine: got dtype {dtype.name}; expected one that torch stores: {', '.join(t.name for t in TORCH)}."
        )
    return TORCH[dtype]


SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def as_signed(t: torch.Tensor) -> torch.Tensor:
    """The same bits in a type that torch can index, flip and fill, for kernels that only move elements."""
    return t.view(SIGNED[t.dtype]) if t.dtype in SIGNED else t
