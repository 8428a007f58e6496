"""popxl's element types in torch and on the host, and those that torch stores but does not compute
with.
"""

from typing import Any

import numpy as np
import torch
from popxl import dtypes

TORCH_DTYPES: dict[dtypes.dtype, torch.dtype] = {
    dtypes.bool: torch.bool,
    dtypes.int8: torch.int8,
    dtypes.int16: torch.int16,
    dtypes.int32: torch.int32,
    dtypes.int64: torch.int64,
    dtypes.uint8: torch.uint8,
    dtypes.uint16: torch.uint16,
    dtypes.uint32: torch.uint32,
    dtypes.uint64: torch.uint64,
    dtypes.float8_143: torch.float8_e4m3fnuz,
    dtypes.float8_152: torch.float8_e5m2fnuz,
    dtypes.float8_e4m3fn: torch.float8_e4m3fn,
    dtypes.float8_e5m2: torch.float8_e5m2,
    dtypes.float16: torch.float16,
    dtypes.bfloat16: torch.bfloat16,
    dtypes.float32: torch.float32,
    dtypes.float64: torch.float64,
    dtypes.complex64: torch.complex64,
    dtypes.complex128: torch.complex128,
}

LIMITED = (torch.uint16, torch.uint32, torch.uint64)
"""Types that torch stores without arithmetic: kernels compute in int64, which wraps to the same
bits.
"""

FLOAT8: dict[torch.dtype, dtypes.dtype] = {
    torch.float8_e4m3fnuz: dtypes.float8_143,
    torch.float8_e5m2fnuz: dtypes.float8_152,
    torch.float8_e4m3fn: dtypes.float8_e4m3fn,
    torch.float8_e5m2: dtypes.float8_e5m2,
}
"""Types that torch stores and converts, without arithmetic. The codes are popxl's."""


def torch_dtype(dtype: dtypes.dtype) -> torch.dtype:
    """The torch type of tensors of a popxl type."""
    return TORCH_DTYPES[dtype]


SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    **dict.fromkeys(FLOAT8, torch.int8),
}


def as_signed(t: torch.Tensor) -> torch.Tensor:
    """The same bits in a type that torch can index, flip and fill, for kernels that only move
    elements.
    """
    return t.view(SIGNED[t.dtype]) if t.dtype in SIGNED else t


def computable(t: torch.Tensor) -> torch.Tensor:
    """Unsigned integers without torch arithmetic in int64; others as they are."""
    return t.to(torch.int64) if t.dtype in LIMITED else t


def ordered(t: torch.Tensor) -> torch.Tensor:
    """Unsigned integers that torch does not compare as int64 of the same order; others as they
    are. `from_ordered` goes back.
    """
    if t.dtype == torch.uint64:
        return t.view(torch.int64) ^ torch.iinfo(torch.int64).min
    return computable(t)


def from_ordered(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `ordered` gave for a tensor of a type, in that type."""
    if dtype == torch.uint64:
        return (t ^ torch.iinfo(torch.int64).min).view(dtype)
    return t.to(dtype)


WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    **dict.fromkeys(LIMITED, torch.int64),
}
"""Types in which others are reduced."""
BY_ORDER = ("min", "max")
"""Reductions that choose an element by the order of all."""


def widened(t: torch.Tensor, op: str) -> torch.Tensor:
    """Values in the type in which others of its type are reduced; unsigned integers that are
    compared, in the same order.
    """
    is_ordered = op in BY_ORDER and t.dtype in LIMITED
    if is_ordered:
        return ordered(t)
    return t.to(WIDER[t.dtype]) if t.dtype in WIDER else t


def narrowed(t: torch.Tensor, dtype: torch.dtype, op: str) -> torch.Tensor:
    """What was made of `widened` ones, in their type."""
    if t.dtype == dtype:
        return t
    return from_ordered(t, dtype) if op in BY_ORDER else t.to(dtype)


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """A host array's memory as a tensor."""
    if array.dtype.names is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.uint8)).view(
        torch_dtype(dtypes.dtype.as_dtype(array.dtype))
    )


def as_array(t: torch.Tensor) -> Any:
    """A host tensor's memory as an array (float32 for bfloat16)."""
    if t.dtype in FLOAT8:
        return t.view(torch.uint8).numpy().view(FLOAT8[t.dtype].as_numpy())
    return (t.float() if t.dtype is torch.bfloat16 else t).numpy()
