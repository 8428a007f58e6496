"""Convolutions of float8 tensors with a scale: those of float32 tensors, where products of float8
are exact.
"""

import torch

from popxl_engine.kernels.casting import power_of_two
from popxl_engine.kernels.convolution import Hint, Windows, conv, conv_transpose
from popxl_engine.kernels.registry import kernel


@kernel("conv_pow2scaled")
def conv_pow2scaled(
    t: torch.Tensor,
    weight: torch.Tensor,
    log2_scale: torch.Tensor,
    windows: Windows,
    groups: int,
    available_memory_proportions: Hint,
    enable_conv_dithering: Hint,
) -> torch.Tensor:
    """Convolve, then scale."""
    wide = conv(t.to(torch.float32), weight.to(torch.float32), windows, groups, None, None, None)
    return (wide * power_of_two(log2_scale)).to(torch.float16)


@kernel("conv_transpose_pow2scaled")
def conv_transpose_pow2scaled(
    t: torch.Tensor,
    weight: torch.Tensor,
    log2_scale: torch.Tensor,
    windows: Windows,
    groups: int,
    available_memory_proportions: Hint,
    enable_conv_dithering: Hint,
) -> torch.Tensor:
    """Convolve transposed, then scale."""
    wide = conv_transpose(
        t.to(torch.float32), weight.to(torch.float32), windows, groups, None, None, None
    )
    return (wide * power_of_two(log2_scale)).to(torch.float16)
