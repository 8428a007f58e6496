"""Products of float8 tensors with scales of their own: those of float32 tensors, where products of
float8 are exact, and on GPUs that have them those of the tensor cores.
"""

import functools

import torch
from popxl import dtypes

from popxl_engine.kernels.dtypes import torch_dtype
from popxl_engine.kernels.linalg import product
from popxl_engine.kernels.registry import kernel

FURTHEST = 63
"""Scales are 2 to this at most, and to its negative at least: two make a normal number."""
EXPONENT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
"""The exponents of both types' largest numbers, which are 1.75 times 2 to these."""
UNIT = 16
"""Elements of which inner axes and columns are multiples where tensor cores multiply float8."""
CAPABILITY = (8, 9)
"""The compute capability from which on they do."""


@kernel("amax")
def amax(t: torch.Tensor) -> torch.Tensor:
    """The end of t's range that is further from 0, without a copy of t."""
    if not t.numel():
        return t.new_zeros((), dtype=torch.float32)
    low, high = torch.aminmax(t)
    return torch.maximum(low.neg(), high).to(torch.float32)


def log2_scale(largest: torch.Tensor, narrow: torch.dtype) -> torch.Tensor:
    """The exponent of the scale of a float8 tensor, int32 scalar, from the bits of what
    `to_float8` got: on a GPU, too, nobody waits for it.
    """
    bits = largest.view(torch.int32)
    exponent, mantissa = (bits >> 23) - 127, bits & 0x7FFFFF
    found = EXPONENT[narrow] - exponent - (mantissa > 0x600000).to(torch.int32)
    return found.clamp_(-FURTHEST, FURTHEST)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2**exponent in float32, exactly, made from its bits."""
    return (exponent + 127).bitwise_left_shift_(23).view(torch.float32)


@kernel("to_float8")
def to_float8(t: torch.Tensor, amax: torch.Tensor, data_type: dtypes.dtype) -> torch.Tensor:
    """Scaled in float32, where it is exact down to far below the smallest float8. An infinity,
    which versions of torch round to 448 or to NaN, makes the scale NaN.
    """
    narrow = torch_dtype(data_type)
    scale = power_of_two(log2_scale(amax, narrow)).add_(amax - amax)
    return (t.to(torch.float32) * scale).to(narrow)


@kernel("float8_matmul")
def float8_matmul(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    lhs_amax: torch.Tensor,
    rhs_amax: torch.Tensor,
    output_type: dtypes.dtype,
) -> torch.Tensor:
    """lhs @ rhs in float32, and both scales taken back at once."""
    wide = product(lhs.to(torch.float32), rhs.to(torch.float32), torch.float32)
    exponent = log2_scale(lhs_amax, lhs.dtype) + log2_scale(rhs_amax, rhs.dtype)
    return wide.mul_(power_of_two(-exponent)).to(torch_dtype(output_type))


@functools.cache
def multiplies_float8(device: torch.device) -> bool:
    """Whether a GPU's tensor cores multiply float8. A plan's tensors are on none: they stand for
    those of the GPU that is here.
    """
    if not torch.cuda.is_available():
        return False
    gpu = device if device.type == "cuda" else None
    return torch.cuda.get_device_capability(gpu) >= CAPABILITY


@kernel("float8_matmul", device="cuda")
def float8_matmul_by_tensor_cores(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    lhs_amax: torch.Tensor,
    rhs_amax: torch.Tensor,
    output_type: dtypes.dtype,
) -> torch.Tensor:
    """The same by tensor cores, where they multiply float8."""
    if not multiplies_float8(lhs.device):
        return float8_matmul(lhs, rhs, lhs_amax, rhs_amax, output_type)
    return scaled_product(lhs, rhs, lhs_amax, rhs_amax, torch_dtype(output_type))


def scaled_product(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    lhs_amax: torch.Tensor,
    rhs_amax: torch.Tensor,
    result: torch.dtype,
) -> torch.Tensor:
    """lhs @ rhs by `torch._scaled_mm`, which takes the first by rows and the second by columns, and
    sides that are multiples of 16: others are copied, and zeros added. A copy is of 8 bits.
    """
    rows, columns = lhs.shape[0], rhs.shape[1]
    by_lhs = power_of_two(-log2_scale(lhs_amax, lhs.dtype))
    by_rhs = power_of_two(-log2_scale(rhs_amax, rhs.dtype))
    left, right = by_rows(lhs, rows), by_rows(rhs.t(), columns + -columns % UNIT).t()
    y = torch._scaled_mm(left, right, scale_a=by_lhs, scale_b=by_rhs, out_dtype=result)
    return y if y.shape[1] == columns else y[:, :columns].contiguous()


def by_rows(t: torch.Tensor, rows: int) -> torch.Tensor:
    """A matrix [r, k] whose rows lie one after the other, with zeros up to so many rows and a
    multiple of 16 columns.
    """
    columns = t.shape[1] + -t.shape[1] % UNIT
    if t.shape == (rows, columns):
        return t.contiguous()
    whole = torch.zeros((rows, columns), dtype=torch.uint8, device=t.device)
    whole[: t.shape[0], : t.shape[1]] = t.view(torch.uint8)
    return whole.view(t.dtype)
