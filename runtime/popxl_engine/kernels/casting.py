"""Conversion between element types."""

import torch
from popxl import dtypes
from popxl.errors import ScaleError
from popxl.fp8_utils import SCALES

from popxl_engine.kernels.dtypes import torch_dtype
from popxl_engine.kernels.registry import kernel


@kernel("cast")
def cast(t: torch.Tensor, data_type: dtypes.dtype) -> torch.Tensor:
    """t in another element type, in memory of its own."""
    return t.to(torch_dtype(data_type), copy=True)


def power_of_two(log2_scale: torch.Tensor) -> torch.Tensor:
    """2**log2_scale in float32, exactly, made from its bits.

    Raises:
        ScaleError: for a scale out of range. On a GPU, which nobody waits for, its own
            RuntimeError.
    """
    if log2_scale.is_cuda:
        torch._assert_async(
            (log2_scale >= SCALES.start) & (log2_scale < SCALES.stop),
            f"log2_scale: expected one of {SCALES}.",
        )
    elif int(log2_scale) not in SCALES:
        raise ScaleError(
            f"got log2_scale {int(log2_scale)}; expected {SCALES.start} <= log2_scale < "
            f"{SCALES.stop}. Clip it with ops.clip."
        )
    return (log2_scale + 127).bitwise_left_shift_(23).view(torch.float32)


@kernel("pow2scale_cast_to_fp8")
def pow2scale_cast_to_fp8(
    t: torch.Tensor, log2_scale: torch.Tensor, data_type: dtypes.dtype
) -> torch.Tensor:
    """Scaled in float32, where it is exact down to far below the smallest float8."""
    narrow = torch_dtype(data_type)
    largest = torch.finfo(narrow).max
    return (t.to(torch.float32) * power_of_two(log2_scale)).clamp_(-largest, largest).to(narrow)


@kernel("pow2scale_cast_from_fp8")
def pow2scale_cast_from_fp8(
    t: torch.Tensor, log2_scale: torch.Tensor, data_type: dtypes.dtype
) -> torch.Tensor:
    """Scaled in float32, which holds the result exactly."""
    return t.to(torch.float32).mul_(power_of_two(log2_scale)).to(torch_dtype(data_type))
